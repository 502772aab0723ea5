// P1's BASE (the im2col matrix is built), DECONVGEMM (a panel of it) and REINDEX.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// -- im2col and col2im -----------------------------------------------------------------------------

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

// -- BASE ------------------------------------------------------------------------------------------

template <class T> void base_forward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 n = g.columns(), depth = g.depth();
    T* own = t.columns ? nullptr : scratch.take<T>(n * depth);
    const T* columns = t.columns ? t.columns : own;
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        Filters<T> filters = Filters<T>::forward(g, t.w);
        filters.data += group * g.group_f() * depth;
        const T* bias = t.bias ? t.bias + group * g.group_f() : nullptr;
        if (g.last) {
            if (own) im2col(g, t.x + group * g.group_c(), own);
            Strided<T> rows{columns, depth, 1};
            MatrixC<T> c{t.out + group * g.group_f(), g.f, {nullptr, bias, g.relu != 0}};
            multiply_last(g, filters, rows, c, 1, scratch);
        } else {
            if (own) im2col(g, t.x + group * g.group_c() * g.h * g.w, own);
            Strided<T> matrix{columns, 1, n};
            ImagesC<T> images{t.out + group * g.group_f() * g.pixels(), g.f * g.pixels(),
                              g.pixels(), {bias, nullptr, g.relu != 0}};
            multiply_planar(g, &filters, &matrix, &images, 1, depth, scratch);
        }
    }
}

template <class T> void base_filter(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 n = g.columns(), depth = g.depth();
    T* own = t.columns ? nullptr : scratch.take<T>(n * depth);
    const T* columns = t.columns ? t.columns : own;
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* dw = t.out + group * g.group_f() * depth;
        if (g.last) {
            if (own) im2col(g, t.x + group * g.group_c(), own);
            trans_last(g, t.y + group * g.group_f(), RowsOfK<T>{columns, depth}, dw, scratch);
        } else {
            if (own) im2col(g, t.x + group * g.group_c() * g.h * g.w, own);
            auto rows = [&](int) { return Strided<T>{columns, n, 1}; };
            const T* dy = t.y + group * g.group_f() * g.pixels();
            trans_planar(g, dy, dw, blocks.mc, rows, scratch);
        }
    }
}

// -- DECONVGEMM ------------------------------------------------------------------------------------

// dx = col2im(w^T dy), a panel of pixels of one image at a time (P1, Fig. 7). A thread adds only to
// its own images, or to its own channels of an image: the unpacking needs no lock.
template <class T>
void deconvgemm_planar(const Problem& g, Tensors<T> t, i64 panel_bytes, Scratch& scratch) {
    const i64 m = g.depth(), k = g.group_f(), kc = kc_of<T>(), plane = g.h * g.w;
    const Tile tile = choose_tile<T>(m, g.pixels());
    const i64 nr = tile.nv * lanes<T>, padded = round_up(m, tile.mr);
    const i64 most = std::max<i64>(panel_bytes / (m * (i64)sizeof(T)), 2 * nr) / nr * nr;
    const i64 nc = std::min(round_up(g.pixels(), nr), most);
    T* packed = scratch.take<T>(padded * k);
    T* panels = scratch.take<T>(g.threads * m * nc);
    T* buffers = scratch.take<T>(g.threads * nc * kc);
    if (scratch.measuring()) return;
    const i64 cuts = std::min(g.group_c(), std::max<i64>(1, g.threads / std::max<i64>(g.n, 1)));
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * m);
        pack_whole(filters, m, k, kc, tile.mr, packed, (int)g.threads);
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(g.n * cuts, 1, index, total);
            for (i64 job = mine.begin; job < mine.end; job++) {
                const i64 image = job / cuts;
                const Range channels = part(g.group_c(), tile.mr, job % cuts, cuts);
                T* dx = t.out + (image * g.c + group * g.group_c() + channels.begin) * plane;
                const T* dy = t.y + (image * g.f + group * k) * g.pixels();
                fill_zero(dx, channels.size() * plane);
                for (i64 at = 0; at < g.pixels(); at += nc) {
                    const i64 count = std::min(nc, g.pixels() - at);
                    const Strided<T> errors{dy + at, 1, g.pixels()};
                    WholeA<T> a{packed, padded, tile.mr};
                    PackedB<T, Strided<T>> b{errors, nr, buffers + index * nc * kc};
                    T* panel = panels + index * m * nc;
                    MatrixC<T> c{panel, nc};
                    gemm<T>({channels.begin * g.taps(), channels.end * g.taps()}, {0, count}, k, kc,
                            m, nc, tile, a, b, c);
                    col2im_planar(g, panel + channels.begin * g.taps() * nc, nc, at, at + count,
                                  channels.size(), dx);
                }
            }
        });
    }
}

template <class T>
void deconvgemm_last(const Problem& g, Tensors<T> t, i64 panel_bytes, Scratch& scratch) {
    const i64 n = g.depth(), k = g.group_f(), kc = kc_of<T>();
    const i64 most = std::max<i64>(panel_bytes / (n * (i64)sizeof(T)), 48);
    const Tile tile = choose_tile<T>(most, n, 8);
    const i64 nr = tile.nv * lanes<T>, padded = round_up(n, nr);
    const i64 mc = std::min(g.pixels(), most / tile.mr * tile.mr);
    T* packed = scratch.take<T>(padded * k);
    T* panels = scratch.take<T>(g.threads * mc * n);
    const T** tables = scratch.take<const T*>(g.threads * mc);
    if (scratch.measuring()) return;
    zero(g, g.n * g.c * g.h * g.w, t.out);
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * n);
        pack_whole(filters, n, k, kc, nr, packed, (int)g.threads);
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(g.n, 1, index, total);
            for (i64 image = mine.begin; image < mine.end; image++) {
                const Strided<T> errors{t.y + image * g.f * g.pixels() + group * k, g.f, 1};
                T* dx = t.out + image * g.c * g.h * g.w + group * g.group_c();
                T* panel = panels + index * mc * n;
                for (i64 at = 0; at < g.pixels(); at += mc) {
                    const i64 count = std::min(mc, g.pixels() - at);
                    RowsA<T, const Strided<T>> a{errors, tables + index * mc};
                    WholeB<T> b{packed, padded, nr};
                    MatrixC<T> c{panel - at * n, n};
                    gemm<T>({at, at + count}, {0, n}, k, kc, mc, n, tile, a, b, c);
                    col2im_last(g, panel, at, at + count, dx);
                }
            }
        });
    }
}

template <class T> void deconvgemm(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 panel_bytes = blocks.cache_bytes / 2;
    if (g.last) deconvgemm_last(g, t, panel_bytes, scratch);
    else deconvgemm_planar(g, t, panel_bytes, scratch);
}

// dx by BASE: the matrix of the whole batch, then col2im.
template <class T> void base_backward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 depth = g.depth(), n = g.columns(), k = g.group_f(), kc = kc_of<T>();
    const i64 m = g.last ? n : depth, cols = g.last ? depth : n;
    const Tile tile = choose_tile<T>(m, cols, g.last ? 8 : max_mr);
    const i64 nr = tile.nv * lanes<T>, nc = round_up(blocks.nc / 2, nr), mc = blocks.mc;
    const i64 padded = g.last ? round_up(depth, nr) : round_up(depth, tile.mr);
    T* columns = scratch.take<T>(n * depth);
    T* packed = scratch.take<T>(padded * k);
    T* buffers = scratch.take<T>(g.threads * nc * kc);
    const T** tables = scratch.take<const T*>(g.threads * mc);
    if (scratch.measuring()) return;
    if (g.last) zero(g, g.n * g.c * g.h * g.w, t.out);
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * depth);
        pack_whole(filters, depth, k, kc, g.last ? nr : tile.mr, packed, (int)g.threads);
        MatrixC<T> c{columns, cols};
        const Strided<T> rows{t.y + group * k, g.f, 1};
        const ImagePixels<T> errors{t.y + group * k * g.pixels(), g.f * g.pixels(), g.pixels()};
        parallel((int)g.threads, [&](int index, int total) {
            if (g.last) {
                const Range mine = part(m, tile.mr, index, total);
                RowsA<T, const Strided<T>> a{rows, tables + index * mc};
                WholeB<T> b{packed, padded, nr};
                gemm<T>(mine, {0, cols}, k, kc, mc, cols, tile, a, b, c);
            } else {
                const Share mine = share(m, cols, tile, nr, index, total);
                WholeA<T> a{packed, padded, tile.mr};
                PackedB<T, ImagePixels<T>> b{errors, nr, buffers + index * nc * kc};
                gemm<T>(mine.rows, mine.columns, k, kc, m, nc, tile, a, b, c);
            }
        });
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(g.last ? g.n : g.n * g.group_c(), 1, index, total);
            for (i64 job = mine.begin; job < mine.end; job++) {
                if (g.last) {
                    T* dx = t.out + job * g.c * g.h * g.w + group * g.group_c();
                    col2im_last(g, columns + job * g.pixels() * depth, 0, g.pixels(), dx);
                    continue;
                }
                const i64 image = job / g.group_c(), channel = job % g.group_c();
                T* dx = t.out + (image * g.c + group * g.group_c() + channel) * g.h * g.w;
                fill_zero(dx, g.h * g.w);
                col2im_planar(g, columns + channel * g.taps() * n + image * g.pixels(), n, 0,
                              g.pixels(), 1, dx);
            }
        });
    }
}

// -- REINDEX ---------------------------------------------------------------------------------------

// dw as a CONVGEMM: x becomes x'[c, n, (r, p), (s, q)], whose convolution with dy as the filter and
// strides (p, q) is dw[f, c, r, s] (P1, Fig. 8 and 9).
template <class T> void reindex(const Problem& g, Tensors<T> t, Scratch& scratch) {
    Problem d = g;  // the convolution that computes dw of one group
    d.n = g.group_c(), d.c = g.n, d.h = g.r * g.p, d.w = g.s * g.q;
    d.f = g.group_f(), d.r = g.p, d.s = g.q, d.p = g.r, d.q = g.s;
    d.stride_h = g.p, d.stride_w = g.q, d.pad_h = d.pad_w = 0, d.dilation_h = d.dilation_w = 1;
    d.groups = 1, d.last = d.filter_last = d.relu = 0;
    T* x = scratch.take<T>(d.n * d.c * d.h * d.w);
    T* dy = scratch.take<T>(d.f * g.n * g.pixels());
    T* dw = scratch.take<T>(g.filter_last ? d.f * g.depth() : 0);
    const Scratch start = scratch;
    const Strides from = g.x(), errors = g.y();
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* out = t.out + group * g.group_f() * g.depth();
        if (x) {
            const T* source = t.x + group * g.group_c() * from.channel;
            parallel((int)g.threads, [&](int index, int total) {
                const Range mine = part(d.n * d.c * d.h, 1, index, total);
                for (i64 i = mine.begin; i < mine.end; i++) {
                    const i64 c = i / (d.c * d.h), n = i / d.h % d.c, r = i % d.h / g.p;
                    const i64 row = i % d.h % g.p * g.stride_h - g.pad_h + r * g.dilation_h;
                    T* to = x + i * d.w;
                    fill_zero(to, d.w);
                    if (row < 0 || row >= g.h) continue;
                    const T* line = source + n * from.image + c * from.channel + row * from.row;
                    for (i64 s = 0; s < g.s; s++) {
                        const i64 shift = s * g.dilation_w - g.pad_w;
                        const Span ok = inside(0, g.q, g.stride_w, shift, g.w);
                        copy_strided(to + s * g.q + ok.begin,
                                     line + (ok.begin * g.stride_w + shift) * from.column,
                                     ok.end - ok.begin, g.stride_w * from.column);
                    }
                }
                const Range rows = part(d.f * g.n, 1, index, total);
                for (i64 i = rows.begin; i < rows.end; i++)
                    copy_strided(dy + i * g.pixels(),
                                 t.y + i % g.n * errors.image +
                                     (group * d.f + i / g.n) * errors.channel,
                                 g.pixels(), errors.column);
            });
        }
        const Filters<T> filters{dy, d.depth(), g.pixels(), d.s, 1, d.c, d.r, d.s, false};
        const Patches<T> patches{d, x};
        const MatrixC<T> c{g.filter_last ? dw : out, g.depth()};
        multiply_planar(d, &filters, &patches, &c, 1, d.depth(), scratch);
        if (x && g.filter_last)
            for (i64 f = 0; f < d.f; f++)
                for (i64 i = 0; i < g.depth(); i++)
                    out[f * g.depth() + i % g.taps() * g.group_c() + i / g.taps()] =
                        dw[f * g.depth() + i];
    }
}

}  // namespace shardwise
