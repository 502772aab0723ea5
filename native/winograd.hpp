// Winograd's F(m x m, 3 x 3): 36 multiplications instead of 144 for a 4 x 4 tile of the output
// (Lavin and Gray, 2016). Lanes are channels everywhere, so that transforms have no shuffles:
//
//   V[xi][tile][c] = B^T d B      U[xi][c][f] = G g G^T      y = A^T (V U) A
//
// dx is the same with flipped filters; dw = G^T (sum over tiles of V^T (A dy A^T)) G.
// A tile row is the TW tiles of one slice that begin at the same output row. Volumes are transformed
// slice by slice; their depth stays a plain sum.
#pragma once

#include "winograd_slabs.hpp"

namespace shardwise {

// As many tiles as keep the planes in the second-level cache; but at least enough to reuse the
// filters, which come from further away.
inline i64 tiles_of_chunk(const Problem& g, i64 squares, i64 least_tiles, i64 cache_bytes) {
    const i64 bytes = squares * (g.c + g.f) * (i64)sizeof(float);
    return std::max(least_tiles, cache_bytes / bytes);
}

template <int M> Tiling inputs_of(const Problem& g) {
    return {g.c, g.d, g.h, g.w, g.last, g.pad_h, g.pad_w, (g.p + M - 1) / M, (g.q + M - 1) / M};
}
template <int M> Tiling outputs_of(const Problem& g) {
    return {g.f, g.o, g.p, g.q, g.last, 0, 0, (g.p + M - 1) / M, (g.q + M - 1) / M};
}

template <int M, class T>
void winograd_many(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
                   Scratch& scratch) {
    constexpr int L = lanes<T>, squares = (M + 2) * (M + 2);
    const Tiling t = inputs_of<M>(g), outputs = outputs_of<M>(g);
    const Tile tile = choose_tile<T>(1 << 12, g.f, 8);
    const i64 nr = tile.nv * L, padded = round_up(g.f, nr), k = g.t * g.c;
    const i64 kc = block_of(g.c, g.t, tilings.panel_kc);
    const bool many = squares * k * g.f * (i64)sizeof(T) > 4 * blocks.cache_bytes;
    const i64 least_tiles = many ? tilings.chunk_of_many_filters : tilings.chunk;
    const i64 total_tiles = g.n * g.o * t.down * t.across;
    const i64 most = tiles_of_chunk(g, squares, least_tiles, blocks.cache_bytes);
    const Slabs slabs =
        Slabs::of(g, t, std::min(most, (total_tiles + g.threads - 1) / g.threads));
    T* u = scratch.take<T>(squares * padded * k);
    T* packs = scratch.take<T>(g.threads * std::min(kc, g.c) * 9 * L);
    const i64 band = std::max(band_elements(t, M, L), band_elements(outputs, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    std::vector<Planes<T>> v, products;
    std::vector<const T**> tables;
    for (i64 i = 0; i < g.threads; i++) {
        v.push_back(Planes<T>::of(scratch, squares, slabs.most_inputs(), g.c, L));
        products.push_back(Planes<T>::of(scratch, squares, slabs.most_tiles(), g.f, L));
        tables.push_back(scratch.take<const T*>(slabs.most_tiles() * g.t));
    }
    if (scratch.measuring()) return;
    transform_filters<M>(filters, g.f, nr, kc, packs, u, (int)g.threads);
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(slabs.count(), 1, index, total);
        T* my_band = bands + index * band;
        const Planes<T>&in = v[index], &out = products[index];
        for (i64 at = mine.begin; at < mine.end; at++) {
            const Slab slab = slabs.at(at);
            const i64 count = slab.tiles();
            transform_slab<M>(t, slabs.stacks, slab, slab.all(slabs.halo()), x, my_band, in);
            for (int xi = 0; xi < squares; xi++) {
                const SlabRows<T> rows{in.at(xi, 0), in.width, g.c, slab.tiles_of_slice()};
                RowsA<T, const SlabRows<T>> a{rows, tables[index]};
                WholeB<T> b{u + xi * padded * k, padded, nr};
                MatrixC<T> c{out.at(xi, 0), out.width};
                gemm<T>({0, count}, {0, round_up(g.f, L)}, k, kc, count, padded, tile, a, b, c);
            }
            store_slab<M>(g, outputs, slabs.stacks, slab, out, 0, {0, g.f}, bias, my_band, y);
        }
    });
}

// Few tiles and many filters: transformed filters are not kept in memory, which would take longer
// than to multiply by them. A thread takes panels of filters, a block of channels at a time that
// stays in its second-level cache, for all tiles.
template <int M, class T>
void winograd_few(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
                  Scratch& scratch) {
    constexpr int L = lanes<T>, squares = (M + 2) * (M + 2);
    const Tiling t = inputs_of<M>(g), outputs = outputs_of<M>(g);
    const Slabs slabs = Slabs::of(g, t, g.n * g.o * t.down * t.across);  // one for each stack
    const Tile tile = choose_tile<T>(1 << 12, g.f, 8);
    const i64 nr = tile.nv * L, tiles = slabs.most_tiles(), inputs = slabs.most_inputs();
    const i64 kc = equal_blocks(g.c, tilings.block_kc), panels = (g.f + nr - 1) / nr;
    const i64 band = std::max(band_elements(t, M, L), band_elements(outputs, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    T* packs = scratch.take<T>(g.threads * kc * 9 * L);
    T* u = scratch.take<T>(g.threads * squares * kc * nr);
    const Planes<T> v = Planes<T>::of(scratch, squares, slabs.count() * inputs, g.c, L);
    std::vector<Planes<T>> products;
    for (i64 i = 0; i < g.threads; i++)
        products.push_back(Planes<T>::of(scratch, squares, slabs.count() * tiles, nr, L));
    const T** tables = scratch.take<const T*>(g.threads * tiles);
    if (scratch.measuring()) return;
    for (i64 at = 0; at < slabs.count(); at++) {
        const Slab slab = slabs.at(at);
        Planes<T> to = v;
        to.data += at * inputs * v.width;
        parallel((int)g.threads, [&](int index, int total) {
            const Range units = part(slab.all(slabs.halo()).end, 1, index, total);
            transform_slab<M>(t, slabs.stacks, slab, units, x, bands + index * band, to);
        });
    }
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(panels, 1, index, total);
        const Planes<T>& out = products[index];
        T* my_u = u + index * squares * kc * nr;
        for (i64 panel = mine.begin; panel < mine.end; panel++) {
            const Range channels{panel * nr, std::min(g.f, (panel + 1) * nr)};
            const i64 blocks_of_depth = (g.c + kc - 1) / kc;
            for (i64 block = 0; block < g.t * blocks_of_depth; block++) {
                const i64 deep = block / blocks_of_depth, pc = block % blocks_of_depth * kc;
                const i64 kb = std::min(kc, g.c - pc);
                for (i64 f = channels.begin; f < channels.end; f += L)
                    transform_block<M>(filters, f, std::min<i64>(L, g.f - f), deep, pc, kb, nr,
                                       packs + index * kc * 9 * L, my_u + f - channels.begin,
                                       kb * nr);
                for (i64 job = 0; job < squares * slabs.count(); job++) {
                    const i64 xi = job / slabs.count(), at = job % slabs.count();
                    const i64 first = at * inputs + deep * slabs.at(at).tiles_of_slice();
                    const Strided<T> tile_rows{v.at(xi, first) + pc, v.width, 1};
                    RowsA<T, const Strided<T>> a{tile_rows, tables + index * tiles};
                    WholeB<T> b{my_u + xi * kb * nr, nr, nr};
                    MatrixC<T> c{out.at(xi, at * tiles), out.width, {}, block > 0};
                    gemm<T>({0, tiles}, {0, round_up(channels.size(), L)}, kb, kb, tiles, nr, tile,
                            a, b, c);
                }
            }
            for (i64 at = 0; at < slabs.count(); at++)
                store_slab<M>(g, outputs, slabs.stacks, slabs.at(at), out, at * tiles, channels,
                              bias, bands + index * band, y);
        }
    });
}

template <int M, class T>
void winograd(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
              Scratch& scratch) {
    const i64 tiles = g.n * g.o * ((g.p + M - 1) / M) * ((g.q + M - 1) / M);
    const i64 filter_bytes = (M + 2) * (M + 2) * g.t * g.c * g.f * (i64)sizeof(T);
    if (tiles <= tilings.few && filter_bytes > blocks.cache_bytes)
        winograd_few<M>(g, x, filters, bias, y, scratch);
    else winograd_many<M>(g, x, filters, bias, y, scratch);
}

template <int M> void winograd_forward(const Problem& g, Tensors<float> t, Scratch& scratch) {
    winograd<M>(g, t.x, Filters<float>::forward(g, t.w), t.bias, t.out, scratch);
}

template <int M> void winograd_backward(const Problem& g, Tensors<float> t, Scratch& scratch) {
    winograd<M>(flipped(g), t.y, Filters<float>::backward(g, t.w), (const float*)nullptr, t.out,
                scratch);
}

template <int M> void winograd_filter(const Problem& g, Tensors<float> tensors, Scratch& scratch) {
    using T = float;
    constexpr int L = lanes<T>, A = M + 2, squares = A * A;
    const Tiling x = inputs_of<M>(g), dy = outputs_of<M>(g);
    const Tile tile = choose_tile<T>(g.c, g.f);
    const i64 width = round_up(g.f, L), products = squares * g.t;
    const bool large = products * g.c * width * (i64)sizeof(T) > blocks.cache_bytes;
    const i64 least_tiles = large ? tilings.filter_chunk_of_many : tilings.filter_chunk;
    const i64 most =
        tiles_of_chunk(g, squares, least_tiles, blocks.cache_bytes * g.threads / 2);
    const Slabs slabs = Slabs::of(g, x, most);
    T* sums = scratch.take<T>(products * g.c * width);
    T* dw = scratch.take<T>(g.taps() * g.c * width);
    const i64 band = std::max(band_elements(x, M, L), band_elements(dy, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    const Planes<T> v = Planes<T>::of(scratch, squares, slabs.most_inputs(), g.c, L);
    const Planes<T> z = Planes<T>::of(scratch, squares, slabs.most_tiles(), g.f, L);
    if (scratch.measuring()) return;
    for (i64 at = 0; at < slabs.count(); at++) {
        const Slab slab = slabs.at(at);
        const i64 count = slab.tiles();
        parallel((int)g.threads, [&](int index, int total) {
            T* my_band = bands + index * band;
            transform_slab<M>(x, slabs.stacks, slab,
                              part(slab.all(slabs.halo()).end, 1, index, total), tensors.x,
                              my_band, v);
            transform_errors<M>(dy, slabs.stacks, slab, part(slab.all(0).end, 1, index, total),
                                tensors.y, my_band, z);
        });
        parallel((int)g.threads, [&](int index, int total) {
            // More parts than squares where there are many threads: the rows are shared too.
            const i64 parts = (total + products - 1) / products * (total > 4 ? 4 : 1);
            const i64 cuts = std::max<i64>(1, parts);
            const Range mine = part(products * cuts, 1, index, total);
            for (i64 job = mine.begin; job < mine.end; job++) {
                const i64 product = job / cuts, xi = product / g.t, deep = product % g.t;
                TransposedA<T> a{v.at(xi, deep * slab.tiles_of_slice()), v.width};
                MatrixB<T> b{z.at(xi, 0), z.width};
                MatrixC<T> c{sums + product * g.c * width, width, {}, at > 0};
                gemm<T>(part(g.c, tile.mr, job % cuts, cuts), {0, width}, count, count, g.c, width,
                        tile, a, b, c);
            }
        });
    }
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.c * g.t, 1, index, total);
        for (i64 job = mine.begin; job < mine.end; job++)
            for (i64 f = 0; f < g.f; f += L) {
                const i64 c = job / g.t, deep = job % g.t;
                vec<T> square[squares], done[9];
                for (int xi = 0; xi < squares; xi++)
                    square[xi] = load(sums + ((xi * g.t + deep) * g.c + c) * width + f);
                both_ways<A, 3>(square, done, gradient_line<M>{});
                for (int tap = 0; tap < 9; tap++) store(dw + (job * 9 + tap) * width + f, done[tap]);
            }
    });
    store_filter(g, dw, width, tensors.out);
}

inline bool winograd_takes(const Problem& g, int) {
    return g.r == 3 && g.s == 3 && g.unit_stride() && g.dilation_d == 1 && g.dilation_h == 1 &&
           g.dilation_w == 1 && g.groups == 1;
}

}  // namespace shardwise
