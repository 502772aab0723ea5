// P1's operators on the one loop nest: CONVGEMM (forward, and dx of stride 1), CONVGEMM_TRANS (dw).
#pragma once

#include "scratch.hpp"
#include "sources.hpp"

namespace shardwise {

template <class T> struct Tensors {
    const T* x;
    const T* w;
    const T* y;     // dy, in the backward directions
    const T* bias;  // or null
    T* out;         // y, dx or dw
    const T* columns = nullptr;  // BASE, forward and dw: im2col(x), where it was kept
};

template <class T> void zero(const Problem& g, i64 count, T* to) {
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(count, lanes<T>, index, total);
        fill_zero(to + mine.begin, mine.size());
    });
}

// A block of k is whole segments, or an equal part of one.
inline i64 block_of(i64 segment, i64 limit) {
    if (segment <= limit) return segment * (limit / segment);
    for (i64 parts = 2; segment / parts >= limit / 2; parts++)
        if (segment % parts == 0 && segment / parts <= limit) return segment / parts;
    return segment;
}

template <class T> constexpr i64 kc_of() { return blocks.kc * 4 / (i64)sizeof(T); }

// Planar images: y[f, pixel] = w[f, (c, taps)] im2col[(c, taps), pixel], over the whole batch.
template <class T, class Columns, class C>
void multiply_planar(const Problem& g, const Filters<T>* filters, const Columns* columns,
                     const C* images, i64 groups, i64 terms, Scratch& scratch) {
    const i64 m = g.group_f(), n = g.columns(), kc = kc_of<T>(), nc = blocks.nc / 2;
    const Tile tile = choose_tile<T>(m, n);
    const i64 nr = tile.nv * lanes<T>, padded = round_up(m, tile.mr), block = round_up(nc, nr);
    T* packed = scratch.take<T>(padded * terms);
    T* buffers = scratch.take<T>(g.threads * block * kc);
    if (scratch.measuring()) return;
    for (i64 group = 0; group < groups; group++) {
        pack_whole(filters[group], m, terms, kc, tile.mr, packed, (int)g.threads);
        parallel((int)g.threads, [&](int index, int total) {
            const Share mine = share(m, n, tile, nr, index, total);
            WholeA<T> a{packed, padded, tile.mr};
            PackedB<T, Columns> b{columns[group], nr, buffers + index * block * kc};
            gemm<T>(mine.rows, mine.columns, terms, kc, m, block, tile, a, b, images[group]);
        });
    }
}

// Channels last: y[pixel, f] = im2col[pixel, (taps, c)] w[(taps, c), f]; nothing of x is copied.
template <class T, class Rows>
void multiply_last(const Problem& g, const Filters<T>& filters, Rows& rows, MatrixC<T> c,
                   i64 segment, Scratch& scratch) {
    const i64 m = g.columns(), n = g.group_f(), k = g.terms();
    const i64 kc = block_of(segment, kc_of<T>() * 4 / 3);
    const Tile tile = choose_tile<T>(m, n, 8);
    const i64 nr = tile.nv * lanes<T>, padded = round_up(n, nr);
    const i64 mc = round_up(blocks.mc / 2, tile.mr), table = mc * std::max<i64>(1, kc / segment);
    T* packed = scratch.take<T>(padded * k);
    const T** tables = scratch.take<const T*>(g.threads * table);
    if (scratch.measuring()) return;
    pack_whole(filters, n, k, kc, nr, packed, (int)g.threads);
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(m, tile.mr, index, total);
        RowsA<T, Rows> a{rows, tables + index * table};
        WholeB<T> b{packed, padded, nr};
        // A block of rows at a time, over all of k, so that its part of C stays in the cache.
        for (i64 i = mine.begin; i < mine.end; i += mc)
            gemm<T>({i, std::min(i + mc, mine.end)}, {0, n}, k, kc, mc, n, tile, a, b, c);
    });
}

template <class T>
void convolve(const Problem& g, const T* x, const Filters<T>& one, i64 filters_by_group,
              const T* bias, T* y, Scratch& scratch) {
    auto filters = [&](i64 group) {
        Filters<T> of = one;
        of.data += group * filters_by_group;
        return of;
    };
    auto group_bias = [&](i64 group) { return bias ? bias + group * g.group_f() : nullptr; };
    const bool relu = g.relu != 0;
    if (!g.last) {
        std::vector<Filters<T>> weights;
        std::vector<Patches<T>> patches;
        std::vector<ImagesC<T>> images;
        for (i64 group = 0; group < g.groups; group++) {
            weights.push_back(filters(group));
            patches.push_back({g, x + group * g.group_c() * g.inputs()});
            images.push_back({y + group * g.group_f() * g.pixels(), g.f * g.pixels(), g.pixels(),
                              {group_bias(group), nullptr, relu}});
        }
        return multiply_planar(g, weights.data(), patches.data(), images.data(), g.groups,
                               g.terms(), scratch);
    }
    T* zeros = scratch.take<T>(g.group_c());
    const Scratch start = scratch;
    if (!scratch.measuring()) fill_zero(zeros, g.group_c());
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        PatchRows<T> rows{g, x + group * g.group_c(), zeros};
        MatrixC<T> c{y + group * g.group_f(), g.f, {nullptr, group_bias(group), relu}};
        multiply_last(g, filters(group), rows, c, g.group_c(), scratch);
    }
}

template <class T> void convgemm_forward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 by_group = g.group_f() * g.terms();
    convolve(g, t.x, Filters<T>::forward(g, t.w), by_group, t.bias, t.out, scratch);
}

// dx of a convolution of stride 1 is itself a convolution of dy.
template <class T> void convgemm_backward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 by_group = g.group_f() * g.terms();
    convolve<T>(flipped(g), t.y, Filters<T>::backward(g, t.w), by_group, nullptr, t.out, scratch);
}

// -- CONVGEMM_TRANS -------------------------------------------------------------------------------

// dw of one group from its transpose, [(c, taps)][f].
template <class T> void store_filter(const Problem& g, const T* from, i64 ld, T* dw) {
    const Strides d = g.filter();
    const i64 terms = g.terms();
    if (d.column == 1) return transpose_block(from, ld, terms, g.group_f(), dw, terms, terms);
    for (i64 f = 0; f < g.group_f(); f++)
        for (i64 i = 0; i < terms; i++) {
            const i64 c = i / g.taps(), tap = i % g.taps();
            dw[f * d.image + c * d.channel + tap * d.column] = from[i * ld + f];
        }
}

// Planar: dw^T[(c, taps), f] = im2col[(c, taps), pixel] dy^T[pixel, f]; k runs over the batch.
// Rows of im2col are copied as they lie, and only dy, the smaller matrix, is transposed.
template <class T, class Rows>
void trans_planar(const Problem& g, const T* dy, T* dw, i64 mc, Rows make_rows, Scratch& scratch) {
    const i64 m = g.terms(), n = g.group_f(), k = g.columns(), kc = kc_of<T>();
    const Tile tile = choose_tile<T>(m, n, 8);
    const i64 nr = tile.nv * lanes<T>, ld = round_up(n, nr);
    T* sums = scratch.take<T>(m * ld);
    T* panels = scratch.take<T>(g.threads * ld * kc);
    const T** tables = scratch.take<const T*>(g.threads * mc);
    if (scratch.measuring()) return;
    const ImageColumns<T> columns{dy, g.f * g.pixels(), g.pixels()};
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(m, tile.mr, index, total);
        auto rows = make_rows(index);
        RowsA<T, decltype(rows)> a{rows, tables + index * mc};
        PackedB<T, ImageColumns<T>> b{columns, nr, panels + index * ld * kc};
        MatrixC<T> c{sums, ld};
        if (mine.size() > 0)
            gemm<T>(mine, {0, n}, k, kc, mc, ld, tile, a, b, c);
    });
    store_filter(g, sums, ld, dw);
}

// Channels last: dw[f, (taps, c)] = dy^T[f, pixel] im2col[pixel, (taps, c)]; nothing is transposed.
template <class T, class Columns>
void trans_last(const Problem& g, const T* dy, const Columns& columns, T* dw, Scratch& scratch) {
    const i64 m = g.group_f(), n = g.terms(), k = g.columns();
    const i64 kc = kc_of<T>(), mc = blocks.mc * 3 / 2;
    const Tile tile = choose_tile<T>(m, n);
    const i64 nr = tile.nv * lanes<T>, nc = round_up(std::min(n, blocks.nc), nr);
    const i64 rows = round_up(std::min(m, mc), tile.mr);
    T* sums = g.filter_last || g.taps() == 1 ? dw : scratch.take<T>(m * n);
    T* a_panels = scratch.take<T>(g.threads * rows * kc);
    T* b_panels = scratch.take<T>(g.threads * nc * kc);
    if (scratch.measuring()) return;
    const RowsOfK<T> errors{dy, g.f};
    parallel((int)g.threads, [&](int index, int total) {
        const Share mine = share(m, n, tile, nr, index, total);
        PackedA<T, RowsOfK<T>> a{errors, tile.mr, a_panels + index * rows * kc};
        PackedB<T, Columns> b{columns, nr, b_panels + index * nc * kc};
        MatrixC<T> c{sums, n};
        gemm<T>(mine.rows, mine.columns, k, kc, rows, nc, tile, a, b, c);
    });
    if (sums == dw) return;
    for (i64 f = 0; f < m; f++)  // (taps, c) to (c, taps)
        for (i64 tap = 0; tap < g.taps(); tap++)
            for (i64 c = 0; c < g.group_c(); c++)
                dw[f * n + c * g.taps() + tap] = sums[f * n + tap * g.group_c() + c];
}

template <class T> void convgemm_trans(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 mc = trans_rows, stride = kc_of<T>() + lanes<T>;
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* dw = t.out + group * g.group_f() * g.terms();
        if (g.last) {
            TapColumns<T> columns{g, t.x + group * g.group_c()};
            trans_last(g, t.y + group * g.group_f(), columns, dw, scratch);
            continue;
        }
        T* buffers = scratch.take<T>(g.threads * mc * stride);
        const T* x = t.x + group * g.group_c() * g.inputs();
        auto rows = [&](int index) {
            return TapRows<T>{g, x, buffers + index * mc * stride, stride};
        };
        trans_planar(g, t.y + group * g.group_f() * g.pixels(), dw, mc, rows, scratch);
    }
}

}  // namespace shardwise
