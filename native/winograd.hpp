// Winograd's F(m x m, 3 x 3): 36 multiplications instead of 144 for a 4 x 4 tile of the output
// (Lavin and Gray, 2016). Lanes are channels everywhere, so that transforms have no shuffles:
//
//   V[xi][tile][c] = B^T d B      U[xi][c][f] = G g G^T      y = A^T (V U) A
//
// dx is the same with flipped filters; dw = G^T (sum over tiles of V^T (A dy A^T)) G.
// A tile row is the TW tiles of one image that begin at the same output row.
#pragma once

#include "winograd_tiles.hpp"

namespace shardwise {

// As many tile rows as keep the planes in the second-level cache; but at least enough tiles to
// reuse the filters, which come from further away.
inline i64 tile_rows_of_chunk(i64 bytes_per_tile, i64 across, i64 least_tiles, i64 cache_bytes) {
    const i64 tiles = std::max(least_tiles, cache_bytes / bytes_per_tile);
    return std::max<i64>(1, tiles / across);
}

template <int M> Tiling tiling_of(i64 channels, i64 h, i64 w, i64 last, i64 pad_h, i64 pad_w, i64 p,
                                  i64 q) {
    return {channels, h, w, last, pad_h, pad_w, (p + M - 1) / M, (q + M - 1) / M};
}

template <int M, class T>
void winograd_many(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
                   Scratch& scratch) {
    constexpr int L = lanes<T>, A = M + 2, squares = A * A;
    const Tiling t = tiling_of<M>(g.c, g.h, g.w, g.last, g.pad_h, g.pad_w, g.p, g.q);
    const Tile tile = choose_tile<T>(1 << 12, g.f, 8);
    const i64 nr = tile.nv * L, padded = round_up(g.f, nr), units = g.n * t.down;
    const i64 kc = equal_blocks(g.c, tilings.panel_kc);
    const bool many = squares * g.c * g.f * (i64)sizeof(T) > 4 * blocks.cache_bytes;
    const i64 least_tiles = many ? tilings.chunk_of_many_filters : tilings.chunk;
    const i64 most = tile_rows_of_chunk(squares * (g.c + g.f) * sizeof(T), t.across, least_tiles,
                                        blocks.cache_bytes);
    const i64 chunk = std::min(most, (units + g.threads - 1) / g.threads), tiles = chunk * t.across;
    T* u = scratch.take<T>(squares * padded * g.c);
    T* packs = scratch.take<T>(g.threads * kc * 9 * L);
    const Tiling outputs{g.f, g.p, g.q, 0, 0, 0, t.down, t.across};
    const i64 band = std::max(band_elements(t, M, L), band_elements(outputs, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    std::vector<Planes<T>> v, products;
    std::vector<const T**> tables;
    for (i64 i = 0; i < g.threads; i++) {
        v.push_back(Planes<T>::of(scratch, squares, tiles, g.c, L));
        products.push_back(Planes<T>::of(scratch, squares, tiles, g.f, L));
        tables.push_back(scratch.take<const T*>(tiles));
    }
    if (scratch.measuring()) return;
    transform_filters<M>(filters, g.f, nr, kc, packs, u, (int)g.threads);
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(units, 1, index, total);
        T* my_band = bands + index * band;
        const Planes<T>&in = v[index], &out = products[index];
        for (i64 unit = mine.begin; unit < mine.end; unit += chunk) {
            const Range rows{unit, std::min(unit + chunk, mine.end)};
            const i64 count = rows.size() * t.across;
            transform_tiles<M, A, A>(t, x, rows, my_band, in, 0,
                                     input_line<M>{});
            for (int xi = 0; xi < squares; xi++) {
                const Strided<T> tile_rows{in.at(xi, 0), in.width, 1};
                RowsA<T, const Strided<T>> a{tile_rows, tables[index]};
                WholeB<T> b{u + xi * padded * g.c, padded, nr};
                MatrixC<T> c{out.at(xi, 0), out.width};
                gemm<T>({0, count}, {0, round_up(g.f, L)}, g.c, kc, count, padded, tile, a, b, c);
            }
            store_tiles<M>(g, t, out, rows, {0, g.f}, bias, my_band, y);
        }
    });
}

// Few tiles and many filters: transformed filters are not kept in memory, which would take longer
// than to multiply by them. A thread takes panels of filters, a block of channels at a time that
// stays in its second-level cache, for all tiles.
template <int M, class T>
void winograd_few(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
                  Scratch& scratch) {
    constexpr int L = lanes<T>, A = M + 2, squares = A * A;
    const Tiling t = tiling_of<M>(g.c, g.h, g.w, g.last, g.pad_h, g.pad_w, g.p, g.q);
    const Tiling outputs{g.f, g.p, g.q, 0, 0, 0, t.down, t.across};
    const Tile tile = choose_tile<T>(1 << 12, g.f, 8);
    const i64 nr = tile.nv * L, units = g.n * t.down, tiles = units * t.across;
    const i64 kc = equal_blocks(g.c, tilings.block_kc), panels = (g.f + nr - 1) / nr;
    const i64 band = std::max(band_elements(t, M, L), band_elements(outputs, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    T* packs = scratch.take<T>(g.threads * kc * 9 * L);
    T* u = scratch.take<T>(g.threads * squares * kc * nr);
    const Planes<T> v = Planes<T>::of(scratch, squares, tiles, g.c, L);
    std::vector<Planes<T>> products;
    for (i64 i = 0; i < g.threads; i++)
        products.push_back(Planes<T>::of(scratch, squares, tiles, nr, L));
    const T** tables = scratch.take<const T*>(g.threads * tiles);
    if (scratch.measuring()) return;
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(units, 1, index, total);
        transform_tiles<M, A, A>(t, x, mine, bands + index * band, v, mine.begin * t.across,
                                 input_line<M>{});
    });
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(panels, 1, index, total);
        const Planes<T>& out = products[index];
        T* my_u = u + index * squares * kc * nr;
        for (i64 panel = mine.begin; panel < mine.end; panel++) {
            const Range channels{panel * nr, std::min(g.f, (panel + 1) * nr)};
            for (i64 pc = 0; pc < g.c; pc += kc) {
                const i64 kb = std::min(kc, g.c - pc);
                for (i64 f = channels.begin; f < channels.end; f += L)
                    transform_block<M>(filters, f, std::min<i64>(L, g.f - f), pc, kb, nr,
                                       packs + index * kc * 9 * L, my_u + f - channels.begin,
                                       kb * nr);
                for (int xi = 0; xi < squares; xi++) {
                    const Strided<T> tile_rows{v.at(xi, 0) + pc, v.width, 1};
                    RowsA<T, const Strided<T>> a{tile_rows, tables + index * tiles};
                    WholeB<T> b{my_u + xi * kb * nr, nr, nr};
                    MatrixC<T> c{out.at(xi, 0), out.width, {}, pc > 0};
                    gemm<T>({0, tiles}, {0, round_up(channels.size(), L)}, kb, kb, tiles, nr, tile,
                            a, b, c);
                }
            }
            store_tiles<M>(g, t, out, {0, units}, channels, bias, bands + index * band, y);
        }
    });
}

template <int M, class T>
void winograd(const Problem& g, const T* x, const Filters<T>& filters, const T* bias, T* y,
              Scratch& scratch) {
    const i64 tiles = g.n * ((g.p + M - 1) / M) * ((g.q + M - 1) / M);
    const i64 filter_bytes = (M + 2) * (M + 2) * g.c * g.f * (i64)sizeof(T);
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
    const Tiling x = tiling_of<M>(g.c, g.h, g.w, g.last, g.pad_h, g.pad_w, g.p, g.q);
    const Tiling dy = tiling_of<M>(g.f, g.p, g.q, g.last, 0, 0, g.p, g.q);
    const Tile tile = choose_tile<T>(g.c, g.f);
    const i64 units = g.n * x.down, width = round_up(g.f, L);
    const bool large = squares * g.c * width * (i64)sizeof(T) > blocks.cache_bytes;
    const i64 least_tiles = large ? tilings.filter_chunk_of_many : tilings.filter_chunk;
    const i64 most = tile_rows_of_chunk(squares * (g.c + g.f) * sizeof(T), x.across, least_tiles,
                                        blocks.cache_bytes * g.threads / 2);
    const i64 chunk = std::min(units, most);
    const i64 tiles = chunk * x.across;
    T* sums = scratch.take<T>(squares * g.c * width);
    T* dw = scratch.take<T>(9 * g.c * width);
    const i64 band = std::max(band_elements(x, M, L), band_elements(dy, M, L));
    T* bands = scratch.take<T>(g.threads * band);
    const Planes<T> v = Planes<T>::of(scratch, squares, tiles, g.c, L);
    const Planes<T> z = Planes<T>::of(scratch, squares, tiles, g.f, L);
    if (scratch.measuring()) return;
    for (i64 unit = 0; unit < units; unit += chunk) {
        const i64 rows = std::min(chunk, units - unit), count = rows * x.across;
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(rows, 1, index, total);
            const Range here{unit + mine.begin, unit + mine.end};
            T* my_band = bands + index * band;
            transform_tiles<M, A, A>(x, tensors.x, here, my_band, v, mine.begin * x.across,
                                     input_line<M>{});
            transform_tiles<M, M, A>(dy, tensors.y, here, my_band, z, mine.begin * x.across,
                                     errors_line<M>{});
        });
        parallel((int)g.threads, [&](int index, int total) {
            // More parts than squares where there are many threads: the rows are shared too.
            const i64 parts = (total + squares - 1) / squares * (total > 4 ? 4 : 1);
            const i64 cuts = std::max<i64>(1, parts);
            const Range mine = part(squares * cuts, 1, index, total);
            for (i64 job = mine.begin; job < mine.end; job++) {
                const i64 xi = job / cuts;
                TransposedA<T> a{v.at(xi, 0), v.width};
                MatrixB<T> b{z.at(xi, 0), z.width};
                MatrixC<T> c{sums + xi * g.c * width, width, {}, unit > 0};
                gemm<T>(part(g.c, tile.mr, job % cuts, cuts), {0, width}, count, count, g.c, width,
                        tile, a, b, c);
            }
        });
    }
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.c, 1, index, total);
        for (i64 c = mine.begin; c < mine.end; c++)
            for (i64 f = 0; f < g.f; f += L) {
                vec<T> square[squares], done[9];
                for (int xi = 0; xi < squares; xi++)
                    square[xi] = load(sums + (xi * g.c + c) * width + f);
                both_ways<A, 3>(square, done, gradient_line<M>{});
                for (int tap = 0; tap < 9; tap++) store(dw + (c * 9 + tap) * width + f, done[tap]);
            }
    });
    store_filter(g, dw, width, tensors.out);
}

inline bool winograd_takes(const Problem& g, int) {
    return g.flat() && g.r == 3 && g.s == 3 && g.unit_stride() && g.dilation_h == 1 &&
           g.dilation_w == 1 && g.groups == 1;
}

}  // namespace shardwise
