// What Winograd's products are made of: images and filters in transformed squares, and back.
#pragma once

#include "winograd_lines.hpp"

namespace shardwise {

// Slices as tiles: windows of Size x Size at steps of M from -pad. An image is a volume of one slice.
struct Tiling {
    i64 channels, depth, h, w, last, pad_h, pad_w;
    i64 down, across;  // tiles of a slice

    // Where this channel begins in a slice; slices are counted through the batch.
    i64 plane(i64 slice, i64 channel) const {
        const i64 size = h * w;
        if (last) return slice * size * channels + channel;
        return ((slice / depth * channels + channel) * depth + slice % depth) * size;
    }
};

// Rows of a band that holds tile rows of one image, channels as lanes; at least one tile row.
inline i64 tile_rows_of_band(const Tiling& t, i64 m) {
    return std::max<i64>(1, (tilings.band_bytes / (t.w * SW_VECTOR_BYTES) - 2) / m);
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
        const i64 first = unit % t.down;
        const i64 rows = std::min({most, t.down - first, tile_rows.end - unit});
        const i64 top = std::max<i64>(0, first * M - t.pad_h);
        const i64 bottom = std::min(t.h, (first + rows - 1) * M - t.pad_h + Size);
        const T* from = x + t.plane(unit / t.down, channel) + top * t.w * (t.last ? t.channels : 1);
        const T* base = in_place ? from : band;  // of (top, 0)
        const i64 by_column = in_place ? t.channels : L;
        if (!in_place && t.last)
            for (i64 i = 0; i < (bottom - top) * t.w; i++)
                store(band + i * L, load_part(from + i * t.channels, count));
        else if (!in_place && bottom > top)
            transpose_block(from, t.depth * t.h * t.w, count, (bottom - top) * t.w, band, L, L);
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
        const i64 width = round_up(channels, unit);
        const i64 plane = round_up(tiles * width, 1024) + lanes<T>;
        return {scratch.take<T>(squares * plane), width, plane};
    }
    T* at(i64 xi, i64 tile) const { return data + xi * plane + tile * width; }
    void zero(i64 squares, i64 tile, i64 tiles) const {
        for (i64 xi = 0; xi < squares; xi++) fill_zero(at(xi, tile), tiles * width);
    }
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

// u[xi * plane + c * nr] for one vector of filters f, the 3 x 3 taps of one depth, and the channels
// [pc, pc + kb).
template <int M, class T>
void transform_block(const Filters<T>& filters, i64 f, i64 count, i64 deep, i64 pc, i64 kb, i64 nr,
                     T* pack, T* u, i64 plane) {
    constexpr int L = lanes<T>, A = M + 2;
    if (filters.taps_first)
        for (int tap = 0; tap < 9; tap++)
            filters.pack(f, count, (deep * 9 + tap) * filters.others + pc, kb, L,
                         pack + tap * kb * L);
    else if (filters.taps == 9) filters.pack(f, count, pc * 9, kb * 9, L, pack);
    else
        for (i64 c = 0; c < kb; c++)
            filters.pack(f, count, (pc + c) * filters.taps + deep * 9, 9, L, pack + c * 9 * L);
    for (i64 c = 0; c < kb; c++) {
        vec<T> taps[9], done[A * A];
        for (int tap = 0; tap < 9; tap++)
            taps[tap] = load(pack + (filters.taps_first ? tap * kb + c : c * 9 + tap) * L);
        both_ways<3, A>(taps, done, filter_line<M>{});
        for (int xi = 0; xi < A * A; xi++) store(u + xi * plane + c * nr, done[xi]);
    }
}

// U[xi][block of k][panel][k][nr], k = (depth, channel), from the filters of all pairs of channels.
// A block has whole depths, or is part of one.
template <int M, class T>
void transform_filters(const Filters<T>& filters, i64 out_channels, i64 nr, i64 kc, T* packs, T* u,
                       int threads) {
    constexpr int L = lanes<T>;
    const i64 channels = filters.others, k = channels * filters.taps / 9;
    const i64 padded = round_up(out_channels, nr), most = std::min(kc, channels);
    parallel(threads, [&](int index, int total) {
        const Range mine = part(out_channels, L, index, total);
        for (i64 f = mine.begin; f < mine.end; f += L)
            for (i64 pc = 0; pc < k; pc += kc) {
                const i64 kb = std::min(kc, k - pc);
                T* block = u + pc * padded + f / nr * nr * kb + f % nr;
                for (i64 at = pc; at < pc + kb; at += most)
                    transform_block<M>(filters, f, std::min<i64>(L, out_channels - f),
                                       at / channels, at % channels, std::min(most, pc + kb - at),
                                       nr, packs + index * most * 9 * L, block + (at - pc) * nr,
                                       padded * k);
            }
    });
}

// Some channels of y of one chunk from their products, bias and ReLU applied on the way.
template <int M, class T>
void store_tiles(const Problem& g, const Tiling& t, const Planes<T>& from, Range tile_rows,
                 i64 first_tile, Range channels, const T* bias, T* band, T* y) {
    constexpr int L = lanes<T>, A = M + 2;
    const i64 most = tile_rows_of_band(t, M);
    for (i64 f = channels.begin; f < channels.end; f += L) {
        const i64 count = std::min<i64>(L, channels.end - f);
        const vec<T> shift = bias ? load_part(bias + f, count) : vec<T>{};
        for (i64 unit = tile_rows.begin; unit < tile_rows.end;) {
            const i64 first = unit % t.down;
            const i64 rows = std::min({most, t.down - first, tile_rows.end - unit});
            const i64 top = first * M, pixels = (std::min(g.p, top + rows * M) - top) * g.q;
            T* to = y + t.plane(unit / t.down, f) + top * g.q * (g.last ? g.f : 1);
            T* base = g.last ? to : band;
            const i64 by_column = g.last ? g.f : L;
            for (i64 tile = 0; tile < rows * t.across; tile++) {
                vec<T> sums[A * A], done[M * M];
                const i64 number = first_tile + (unit - tile_rows.begin) * t.across + tile;
                const T* at = from.at(0, number) + f - channels.begin;
#pragma GCC unroll 36
                for (int xi = 0; xi < A * A; xi++) sums[xi] = load(at + xi * from.plane);
                both_ways<A, M>(sums, done, output_line<M>{});
                const i64 row = tile / t.across * M, column = tile % t.across * M;
                for (int i = 0; i < M && top + row + i < g.p; i++)
                    for (int j = 0; j < M && column + j < g.q; j++) {
                        vec<T> value = done[i * M + j] + shift;
                        if (g.relu) value = relu_of<T>(value);
                        T* pixel = base + ((row + i) * g.q + column + j) * by_column;
                        if (g.last && count < L) store_part(pixel, value, count);
                        else store(pixel, value);
                    }
            }
            if (!g.last) transpose_block(band, L, pixels, count, to, g.pixels(), pixels);
            unit += rows;
        }
    }
}

}  // namespace shardwise
