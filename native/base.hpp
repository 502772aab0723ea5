// P1's BASE: the im2col matrix is built and multiplied.
#pragma once

#include "im2col.hpp"

namespace shardwise {

template <class T> void base_forward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 n = g.columns(), terms = g.terms();
    T* own = t.columns ? nullptr : scratch.take<T>(n * terms);
    const T* columns = t.columns ? t.columns : own;
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        Filters<T> filters = Filters<T>::forward(g, t.w);
        filters.data += group * g.group_f() * terms;
        const T* bias = t.bias ? t.bias + group * g.group_f() : nullptr;
        if (g.last) {
            if (own) im2col(g, t.x + group * g.group_c(), own);
            Strided<T> rows{columns, terms, 1};
            MatrixC<T> c{t.out + group * g.group_f(), g.f, {nullptr, bias, g.relu != 0}};
            multiply_last(g, filters, rows, c, 1, scratch);
        } else {
            if (own) im2col(g, t.x + group * g.group_c() * g.inputs(), own);
            Strided<T> matrix{columns, 1, n};
            ImagesC<T> images{t.out + group * g.group_f() * g.pixels(), g.f * g.pixels(),
                              g.pixels(), {bias, nullptr, g.relu != 0}};
            multiply_planar(g, &filters, &matrix, &images, 1, terms, scratch);
        }
    }
}

template <class T> void base_filter(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 n = g.columns(), terms = g.terms();
    T* own = t.columns ? nullptr : scratch.take<T>(n * terms);
    const T* columns = t.columns ? t.columns : own;
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* dw = t.out + group * g.group_f() * terms;
        if (g.last) {
            if (own) im2col(g, t.x + group * g.group_c(), own);
            trans_last(g, t.y + group * g.group_f(), RowsOfK<T>{columns, terms}, dw, scratch);
        } else {
            if (own) im2col(g, t.x + group * g.group_c() * g.inputs(), own);
            auto rows = [&](int) { return Strided<T>{columns, n, 1}; };
            const T* dy = t.y + group * g.group_f() * g.pixels();
            trans_planar(g, dy, dw, blocks.mc, rows, scratch);
        }
    }
}

// dx by BASE: the matrix of the whole batch, then col2im.
template <class T> void base_backward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 terms = g.terms(), n = g.columns(), k = g.group_f(), kc = kc_of<T>();
    const i64 m = g.last ? n : terms, cols = g.last ? terms : n;
    const Tile tile = choose_tile<T>(m, cols, g.last ? 8 : max_mr);
    const i64 nr = tile.nv * lanes<T>, nc = round_up(blocks.nc / 2, nr), mc = blocks.mc;
    const i64 padded = g.last ? round_up(terms, nr) : round_up(terms, tile.mr);
    T* columns = scratch.take<T>(n * terms);
    T* packed = scratch.take<T>(padded * k);
    T* buffers = scratch.take<T>(g.threads * nc * kc);
    const T** tables = scratch.take<const T*>(g.threads * mc);
    if (scratch.measuring()) return;
    if (g.last) zero(g, g.n * g.c * g.inputs(), t.out);
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * terms);
        pack_whole(filters, terms, k, kc, g.last ? nr : tile.mr, packed, (int)g.threads);
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
                    T* dx = t.out + job * g.c * g.inputs() + group * g.group_c();
                    col2im_last(g, columns + job * g.pixels() * terms, 0, g.pixels(), dx);
                    continue;
                }
                const i64 image = job / g.group_c(), channel = job % g.group_c();
                T* dx = t.out + (image * g.c + group * g.group_c() + channel) * g.inputs();
                fill_zero(dx, g.inputs());
                col2im_planar(g, columns + channel * g.taps() * n + image * g.pixels(), n, 0,
                              g.pixels(), 1, dx);
            }
        });
    }
}

}  // namespace shardwise
