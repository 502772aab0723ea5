// What Winograd's products are made of: images and filters in transformed squares, and back.
#pragma once

#include "winograd_lines.hpp"

namespace shardwise {

// Images as tiles: windows of Size x Size at steps of M from -pad.
struct Tiling {
    i64 channels, h, w, last, pad_h, pad_w;
    i64 down, across;  // tiles of an image
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
            const T* base_of_last = x + ((image * t.h + top) * t.w) * t.channels + channel;
            if (t.last)
                for (i64 i = 0; i < (bottom - top) * t.w; i++)
                    store(band + i * L, load_part(base_of_last + i * t.channels, count));
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
        const i64 width = round_up(channels, unit);
        const i64 plane = round_up(tiles * width, 1024) + lanes<T>;
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
                        if (g.relu) value = relu_of<T>(value);
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

}  // namespace shardwise
