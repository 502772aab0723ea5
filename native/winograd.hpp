// Winograd's F(m x m, 3 x 3): 36 multiplications instead of 144 for a 4 x 4 tile of the output
// (Lavin and Gray, 2016). Lanes are channels everywhere, so that transforms have no shuffles:
//
//   V[xi][tile][c] = B^T d B      U[xi][c][f] = G g G^T      y = A^T (V U) A
//
// dx is the same with flipped filters; dw = G^T (sum over tiles of V^T (A dy A^T)) G.
// A tile row is the TW tiles of one image that begin at the same output row.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

#define SW_INLINE inline __attribute__((always_inline))

template <int M> struct Winograd;

template <> struct Winograd<2> {
    template <class V> SW_INLINE static void input(const V* d, V* o) {  // B^T
        o[0] = d[0] - d[2];
        o[1] = d[1] + d[2];
        o[2] = d[2] - d[1];
        o[3] = d[1] - d[3];
    }
    template <class V> SW_INLINE static void output(const V* m, V* o) {  // A^T
        o[0] = m[0] + m[1] + m[2];
        o[1] = m[1] - m[2] - m[3];
    }
    template <class V> SW_INLINE static void errors(const V* y, V* o) {  // A
        o[0] = y[0];
        o[1] = y[0] + y[1];
        o[2] = y[0] - y[1];
        o[3] = -y[1];
    }
    template <class V> SW_INLINE static void filter(const V* g, V* o) {  // G
        const V even = (g[0] + g[2]) * 0.5f, odd = g[1] * 0.5f;
        o[0] = g[0];
        o[1] = even + odd;
        o[2] = even - odd;
        o[3] = g[2];
    }
    template <class V> SW_INLINE static void gradient(const V* u, V* o) {  // G^T
        const V sum = (u[1] + u[2]) * 0.5f;
        o[0] = u[0] + sum;
        o[1] = (u[1] - u[2]) * 0.5f;
        o[2] = u[3] + sum;
    }
};

template <> struct Winograd<4> {
    template <class V> SW_INLINE static void input(const V* d, V* o) {
        const V a = d[4] - d[2] * 4.f, b = d[3] - d[1] * 4.f;
        const V c = d[4] - d[2], e = (d[3] - d[1]) * 2.f;
        o[0] = d[0] * 4.f - d[2] * 5.f + d[4];
        o[1] = a + b;
        o[2] = a - b;
        o[3] = c + e;
        o[4] = c - e;
        o[5] = d[1] * 4.f - d[3] * 5.f + d[5];
    }
    template <class V> SW_INLINE static void output(const V* m, V* o) {
        const V a = m[1] + m[2], b = m[1] - m[2], c = m[3] + m[4], e = m[3] - m[4];
        o[0] = m[0] + a + c;
        o[1] = b + e * 2.f;
        o[2] = a + c * 4.f;
        o[3] = b + e * 8.f + m[5];
    }
    template <class V> SW_INLINE static void errors(const V* y, V* o) {
        const V a = y[0] + y[2], b = y[1] + y[3];
        const V c = y[0] + y[2] * 4.f, e = y[1] * 2.f + y[3] * 8.f;
        o[0] = y[0];
        o[1] = a + b;
        o[2] = a - b;
        o[3] = c + e;
        o[4] = c - e;
        o[5] = y[3];
    }
    template <class V> SW_INLINE static void filter(const V* g, V* o) {
        const V even = (g[0] + g[2]) * (-1 / 6.f), odd = g[1] * (-1 / 6.f);
        const V a = g[0] * (1 / 24.f) + g[2] * (1 / 6.f), b = g[1] * (1 / 12.f);
        o[0] = g[0] * 0.25f;
        o[1] = even + odd;
        o[2] = even - odd;
        o[3] = a + b;
        o[4] = a - b;
        o[5] = g[2];
    }
    template <class V> SW_INLINE static void gradient(const V* u, V* o) {
        const V a = (u[1] + u[2]) * (-1 / 6.f), b = u[3] + u[4];
        o[0] = u[0] * 0.25f + a + b * (1 / 24.f);
        o[1] = (u[2] - u[1]) * (1 / 6.f) + (u[3] - u[4]) * (1 / 12.f);
        o[2] = a + b * (1 / 6.f) + u[5];
    }
};

// As types rather than pointers to functions, which are not always inlined.
#define SW_LINE(name)                                                 \
    template <int M> struct name##_line {                             \
        template <class V> SW_INLINE void operator()(const V* from, V* to) const { \
            Winograd<M>::name(from, to);                              \
        }                                                             \
    }
SW_LINE(input);
SW_LINE(output);
SW_LINE(errors);
SW_LINE(filter);
SW_LINE(gradient);

// Both dimensions of a square, first down the columns, then along the rows.
template <int From, int To, class V, class Line>
inline __attribute__((always_inline)) void both_ways(const V* in, V* out, Line line) {
    V half[To * From], column[From], done[To];
#pragma GCC unroll 6
    for (int j = 0; j < From; j++) {
#pragma GCC unroll 6
        for (int i = 0; i < From; i++) column[i] = in[i * From + j];
        line(column, done);
#pragma GCC unroll 6
        for (int i = 0; i < To; i++) half[i * From + j] = done[i];
    }
#pragma GCC unroll 6
    for (int i = 0; i < To; i++) line(half + i * From, out + i * To);
}

// Images as tiles: windows of Size x Size at steps of M from -pad.
struct Tiling {
    i64 channels, h, w, last, pad_h, pad_w;
    i64 down, across;  // tiles of an image
};

constexpr i64 band_bytes = 128 << 10;
constexpr i64 panel_kc = 192;   // channels of which a panel of U fits into the first-level cache
constexpr i64 block_kc = 128;   // and of which all squares of a panel fit into the second-level one
constexpr i64 few_tiles = 192;  // for which filters are transformed where they are used

// Rows of a band that holds tile rows of one image, channels as lanes; at least one tile row.
inline i64 tile_rows_of_band(const Tiling& t, i64 m) {
    return std::max<i64>(1, (band_bytes / (t.w * SW_VECTOR_BYTES) - 2) / m);
}

inline i64 band_elements(const Tiling& t, i64 m, i64 lanes_of) {
    return (std::min(tile_rows_of_band(t, m), t.down) * m + 2) * t.w * lanes_of;
}

// Calls visit(tile, patch) for every tile of these tile rows, with one vector of channels.
template <int M, int Size, class T, class Visit>
void visit_tiles(const Tiling& t, const T* x, i64 channel, Range tile_rows, T* band, Visit visit) {
    constexpr int L = lanes<T>;
    const i64 count = std::min<i64>(L, t.channels - channel), most = tile_rows_of_band(t, M);
    const bool in_place = t.last && count == L;
    vec<T> patch[Size * Size];
    for (i64 unit = tile_rows.begin; unit < tile_rows.end;) {
        const i64 image = unit / t.down, first = unit % t.down;
        const i64 rows = std::min({most, t.down - first, tile_rows.end - unit});
        const i64 top = std::max<i64>(0, first * M - t.pad_h);
        const i64 bottom = std::min(t.h, (first + rows - 1) * M - t.pad_h + Size);
        const T* base;       // of (top, 0)
        i64 by_column = L;
        if (in_place) {
            base = x + ((image * t.h + top) * t.w) * t.channels + channel;
            by_column = t.channels;
        } else {
            base = band;
            if (t.last)
                for (i64 i = 0; i < (bottom - top) * t.w; i++)
                    store(band + i * L,
                          load_part(x + ((image * t.h + top) * t.w + i) * t.channels + channel, count));
            else if (bottom > top)
                transpose_block(x + ((image * t.channels + channel) * t.h + top) * t.w, t.h * t.w,
                                count, (bottom - top) * t.w, band, L, L);
        }
        for (i64 tile = 0; tile < rows * t.across; tile++) {
            const i64 row = (first + tile / t.across) * M - t.pad_h;
            const i64 column = tile % t.across * M - t.pad_w;
            if (row >= 0 && column >= 0 && row + Size <= t.h && column + Size <= t.w) {
                const T* from = base + ((row - top) * t.w + column) * by_column;
#pragma GCC unroll 6
                for (int i = 0; i < Size; i++)
#pragma GCC unroll 6
                    for (int j = 0; j < Size; j++)
                        patch[i * Size + j] = load(from + (i * t.w + j) * by_column);
            } else {
                for (int i = 0; i < Size; i++)
                    for (int j = 0; j < Size; j++) {
                        const i64 r = row + i, c = column + j;
                        const bool in = r >= 0 && r < t.h && c >= 0 && c < t.w;
                        patch[i * Size + j] =
                            in ? load(base + ((r - top) * t.w + c) * by_column) : vec<T>{};
                    }
            }
            visit((unit - tile_rows.begin) * t.across + tile, patch);
        }
        unit += rows;
    }
}

// What one chunk of tiles is transformed into: planes [xi][tile][width]. The planes are a line more
// than a multiple of the page apart, or all 36 stores of a tile would go to one set of the cache.
template <class T> struct Planes {
    T* data;
    i64 width, plane;

    static Planes of(Scratch& scratch, i64 squares, i64 tiles, i64 channels, i64 unit) {
        const i64 width = round_up(channels, unit), plane = round_up(tiles * width, 1024) + lanes<T>;
        return {scratch.take<T>(squares * plane), width, plane};
    }
    T* at(i64 xi, i64 tile) const { return data + xi * plane + tile * width; }
};

template <int M, int Size, int To, class T, class Line>
void transform_tiles(const Tiling& t, const T* x, Range tile_rows, T* band, const Planes<T>& to,
                     i64 first_tile, Line line) {
    for (i64 c = 0; c < t.channels; c += lanes<T>)
        visit_tiles<M, Size>(t, x, c, tile_rows, band, [&](i64 tile, const vec<T>* patch) {
            vec<T> done[To * To];
            both_ways<Size, To>(patch, done, line);
            T* at = to.at(0, first_tile + tile) + c;
#pragma GCC unroll 36
            for (int xi = 0; xi < To * To; xi++) store(at + xi * to.plane, done[xi]);
        });
}

// Equal blocks of at most `most` channels.
inline i64 equal_blocks(i64 channels, i64 most) {
    const i64 count = (channels + most - 1) / most;
    return (channels + count - 1) / count;
}

// u[xi * plane + c * nr] for one vector of filters f and the channels [pc, pc + kb).
template <int M, class T>
void transform_block(const Filters<T>& filters, i64 f, i64 count, i64 pc, i64 kb, i64 nr, T* pack,
                     T* u, i64 plane) {
    constexpr int L = lanes<T>, A = M + 2;
    if (filters.taps_first)
        for (int tap = 0; tap < 9; tap++)
            filters.pack(f, count, tap * filters.others + pc, kb, L, pack + tap * kb * L);
    else filters.pack(f, count, pc * 9, kb * 9, L, pack);
    for (i64 c = 0; c < kb; c++) {
        vec<T> taps[9], done[A * A];
        for (int tap = 0; tap < 9; tap++)
            taps[tap] = load(pack + (filters.taps_first ? tap * kb + c : c * 9 + tap) * L);
        both_ways<3, A>(taps, done, filter_line<M>{});
        for (int xi = 0; xi < A * A; xi++) store(u + xi * plane + c * nr, done[xi]);
    }
}

// U[xi][block of c][panel][c][nr] from the filters of all pairs of channels.
template <int M, class T>
void transform_filters(const Filters<T>& filters, i64 out_channels, i64 nr, i64 kc, T* packs, T* u,
                       int threads) {
    constexpr int L = lanes<T>;
    const i64 in_channels = filters.others, padded = round_up(out_channels, nr);
    parallel(threads, [&](int index, int total) {
        const Range mine = part(out_channels, L, index, total);
        for (i64 f = mine.begin; f < mine.end; f += L)
            for (i64 pc = 0; pc < in_channels; pc += kc) {
                const i64 kb = std::min(kc, in_channels - pc);
                transform_block<M>(filters, f, std::min<i64>(L, out_channels - f), pc, kb, nr,
                                   packs + index * kc * 9 * L,
                                   u + pc * padded + f / nr * nr * kb + f % nr,
                                   padded * in_channels);
            }
    });
}

// Some channels of y of one chunk from their products, bias and ReLU applied on the way.
template <int M, class T>
void store_tiles(const Problem& g, const Tiling& t, const Planes<T>& from, Range tile_rows,
                 Range channels, const T* bias, T* band, T* y) {
    constexpr int L = lanes<T>, A = M + 2;
    const i64 most = tile_rows_of_band({g.f, g.p, g.q, 0, 0, 0, 0, 0}, M);
    for (i64 f = channels.begin; f < channels.end; f += L) {
        const i64 count = std::min<i64>(L, channels.end - f);
        const vec<T> shift = bias ? load_part(bias + f, count) : vec<T>{};
        for (i64 unit = tile_rows.begin; unit < tile_rows.end;) {
            const i64 image = unit / t.down, first = unit % t.down;
            const i64 rows = std::min({most, t.down - first, tile_rows.end - unit});
            const i64 top = first * M, pixels = (std::min(g.p, top + rows * M) - top) * g.q;
            T* base = g.last ? y + ((image * g.p + top) * g.q) * g.f + f : band;
            const i64 by_column = g.last ? g.f : L;
            for (i64 tile = 0; tile < rows * t.across; tile++) {
                vec<T> sums[A * A], done[M * M];
                const T* at =
                    from.at(0, (unit - tile_rows.begin) * t.across + tile) + f - channels.begin;
#pragma GCC unroll 36
                for (int xi = 0; xi < A * A; xi++) sums[xi] = load(at + xi * from.plane);
                both_ways<A, M>(sums, done, output_line<M>{});
                const i64 row = tile / t.across * M, column = tile % t.across * M;
                for (int i = 0; i < M && top + row + i < g.p; i++)
                    for (int j = 0; j < M && column + j < g.q; j++) {
                        vec<T> value = done[i * M + j] + shift;
                        if (g.relu) value = value > 0 ? value : vec<T>{};
                        T* to = base + ((row + i) * g.q + column + j) * by_column;
                        if (g.last && count < L) store_part(to, value, count);
                        else store(to, value);
                    }
            }
            if (!g.last)
                transpose_block(band, L, pixels, count,
                                y + ((image * g.f + f) * g.p + top) * g.q, g.pixels(), pixels);
            unit += rows;
        }
    }
}

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
    const i64 kc = equal_blocks(g.c, panel_kc);
    // With few filters the cache decides; many filters, read from memory, want many tiles each time.
    const i64 least_tiles = squares * g.c * g.f * (i64)sizeof(T) > 4 * blocks.cache_bytes ? 192 : 96;
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
    const i64 kc = equal_blocks(g.c, block_kc), panels = (g.f + nr - 1) / nr;
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
    if (tiles <= few_tiles && filter_bytes > blocks.cache_bytes)
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
    const i64 chunk = std::min(units, tile_rows_of_chunk(squares * (g.c + g.f) * sizeof(T), x.across,
                                                         large ? 256 : 64,
                                                         blocks.cache_bytes * g.threads / 2));
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
            const i64 cuts = std::max<i64>(1, (total + squares - 1) / squares * (total > 4 ? 4 : 1));
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
    return g.r == 3 && g.s == 3 && g.unit_stride() && g.dilation_h == 1 && g.dilation_w == 1 &&
           g.groups == 1;
}

}  // namespace shardwise
