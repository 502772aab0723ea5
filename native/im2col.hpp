// The im2col matrix of a whole batch, and back: what it has of each pixel is added up.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// Planar: columns[(c, t, r, s)][pixel]. Channels last: columns[pixel][(t, r, s, c)].
template <class T> void im2col(const Problem& g, const T* x, T* columns) {
    const i64 terms = g.terms(), n = g.columns();
    parallel((int)g.threads, [&](int index, int total) {
        if (!g.last) {
            const Range mine = part(terms, 1, index, total);
            for (i64 i = mine.begin; i < mine.end; i++)
                patch_row(g, x, i / g.taps(), shift_of(g, i % g.taps()), {}, n, columns + i * n);
        } else {
            const Range mine = part(n, 1, index, total);
            TapColumns<T>{g, x}.pack_all(0, terms, mine.begin, mine.size(), terms,
                                         columns + mine.begin * terms);
        }
    });
}

// Adds the pixels [begin, end) of one image's columns [(c, t, r, s)][ld] to channels of dx.
template <class T>
void col2im_planar(const Problem& g, const T* columns, i64 ld, i64 begin, i64 end, i64 channels,
                   T* dx) {
    const std::vector<Shift> taps = shifts_of(g);
    const Pixel first = pixel_at(g, begin);
    for (i64 i = 0; i < channels * g.taps(); i++) {
        const Shift& tap = taps[i % g.taps()];
        Pixel pixel = first;
        for (i64 at = begin; at < end; next_line(g, pixel)) {
            const i64 q = pixel.column, length = std::min(end - at, g.q - q);
            const i64 line = line_of(g, corner_of(g, pixel), tap);
            const Span ok = both(tap.columns, {q, q + length});
            if (line >= 0) {
                const T* from = columns + i * ld + at - begin + (ok.begin - q);
                T* to = dx + (i / g.taps() * g.d * g.h + line) * g.w + ok.begin * g.stride_w +
                        tap.right;
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
    const i64 channels = g.group_c();
    const std::vector<Shift> taps = shifts_of(g);
    Pixel pixel = pixel_at(g, begin);
    for (i64 at = begin; at < end; at++, next_pixel(g, pixel)) {
        const Pixel corner = corner_of(g, pixel);
        for (const Shift& tap : taps) {
            const i64 in = input_of(g, corner, tap);
            if (in >= 0) add(dx + in * g.c, columns, channels);
            columns += channels;
        }
    }
}

}  // namespace shardwise
