// The im2col matrix of a whole batch, and back: what it has of each pixel is added up.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// Planar: columns[(c, r, s)][pixel]. Channels last: columns[pixel][(r, s, c)].
template <class T> void im2col(const Problem& g, const T* x, T* columns) {
    const i64 depth = g.depth(), n = g.columns();
    parallel((int)g.threads, [&](int index, int total) {
        if (!g.last) {
            const Range mine = part(depth, 1, index, total);
            for (i64 i = mine.begin; i < mine.end; i++) patch_row(g, x, i, 0, n, columns + i * n);
        } else {
            const Range mine = part(n, 1, index, total);
            TapColumns<T>{g, x}.pack_all(0, depth, mine.begin, mine.size(), depth,
                                         columns + mine.begin * depth);
        }
    });
}

// Adds the pixels [begin, end) of one image's columns [(c, r, s)][ld] to channels of dx.
template <class T>
void col2im_planar(const Problem& g, const T* columns, i64 ld, i64 begin, i64 end, i64 channels,
                   T* dx) {
    for (i64 i = 0; i < channels * g.taps(); i++) {
        const i64 r = i % g.taps() / g.s, s = i % g.s, shift = s * g.dilation_w - g.pad_w;
        for (i64 at = begin; at < end;) {
            const i64 p = at / g.q, q = at % g.q, length = std::min(end - at, g.q - q);
            const i64 row = p * g.stride_h - g.pad_h + r * g.dilation_h;
            const Span ok = inside(q, q + length, g.stride_w, shift, g.w);
            if (row >= 0 && row < g.h) {
                const T* from = columns + i * ld + at - begin + (ok.begin - q);
                T* to = dx + (i / g.taps() * g.h + row) * g.w + ok.begin * g.stride_w + shift;
                if (g.stride_w == 1) add(to, from, ok.end - ok.begin);
                else
                    for (i64 t = 0; t < ok.end - ok.begin; t++) to[t * g.stride_w] += from[t];
            }
            at += length;
        }
    }
}

// The same for channels last: columns[pixel][ld], of which `channels` of each tap are added.
template <class T>
void col2im_last(const Problem& g, const T* columns, i64 begin, i64 end, T* dx) {
    const i64 depth = g.depth(), channels = g.group_c();
    for (i64 at = begin; at < end; at++)
        for (i64 tap = 0; tap < g.taps(); tap++) {
            const i64 row = at / g.q * g.stride_h - g.pad_h + tap / g.s * g.dilation_h;
            const i64 column = at % g.q * g.stride_w - g.pad_w + tap % g.s * g.dilation_w;
            if (row >= 0 && row < g.h && column >= 0 && column < g.w)
                add(dx + (row * g.w + column) * g.c,
                    columns + (at - begin) * depth + tap * channels, channels);
        }
}

}  // namespace shardwise
