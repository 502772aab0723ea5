// Every machine number of the loop nest, in one table.
#pragma once

#include "micro.hpp"

namespace shardwise {

struct Tile {
    int mr, nv;
};

// mc x kc of A and kc x nc of B are meant to stay in the second-level cache.
struct Blocks {
    const char* cpu;
    i64 kc, mc, nc;     // in elements of 4 bytes
    i64 cache_bytes;    // what one thread's panels may take of the second-level cache
    Tile tiles[3];      // the widest tiles that fit the registers
};

#if defined(__AVX512F__)
constexpr Blocks blocks = {"avx512", 288, 336, 960, 1536 << 10, {{14, 2}, {8, 3}, {6, 4}}};
#elif defined(__AVX2__)
constexpr Blocks blocks = {"avx2", 256, 144, 1024, 192 << 10, {{6, 2}, {4, 3}, {4, 3}}};
#elif defined(__ARM_NEON)
constexpr Blocks blocks = {"neon", 256, 128, 1024, 384 << 10, {{8, 3}, {6, 4}, {8, 2}}};
#else
constexpr Blocks blocks = {"portable", 256, 96, 512, 192 << 10, {{6, 2}, {4, 3}, {4, 3}}};
#endif

// Winograd and direct convolutions; the same on every CPU so far.
struct Tilings {
    i64 band_bytes, direct_band_bytes;  // of a band of images that a thread has at hand
    i64 panel_kc;  // channels of which a panel of U fits into the first-level cache
    i64 block_kc;  // and of which all squares of a panel fit into the second-level one
    i64 few;       // tiles for which filters are transformed where they are used
    // The least tiles of a chunk: the cache decides, but filters (or sums) that are read from
    // memory want many tiles each time.
    i64 chunk, chunk_of_many_filters, filter_chunk, filter_chunk_of_many;
};
constexpr Tilings tilings = {128 << 10, 256 << 10, 192, 128, 192, 96, 192, 64, 256};

// Rows of im2col that CONVGEMM_TRANS copies at a time.
constexpr i64 trans_rows = 96;

// Two multiply-adds a cycle, at best; a tile too small to hide their latency, or with more loads
// than multiply-adds, is slower.
inline double tile_cycles(int mr, int nv) {
    const double latency = 8, work = mr * nv, loads = mr + nv;
    return (work > loads ? (work > latency ? work : latency) : (loads > latency ? loads : latency));
}

template <class T> inline double cycles(i64 m, i64 n, Tile tile) {
    const i64 vectors = (n + lanes<T> - 1) / lanes<T>;
    const i64 whole = vectors / tile.nv, rest = vectors % tile.nv;
    auto column = [&](int nv) {
        const i64 rows = m % tile.mr;
        return (m / tile.mr) * tile_cycles(tile.mr, nv) + (rows ? tile_cycles(rows, nv) : 0);
    };
    return whole * column(tile.nv) + (rest ? column(rest) : 0);
}

// The tile whose edges waste least on an m x n matrix, among those of at most max_rows rows.
template <class T> inline Tile choose_tile(i64 m, i64 n, int max_rows = max_mr) {
    Tile best = {0, 0};
    for (Tile tile : blocks.tiles)
        if (tile.mr <= max_rows &&
            (!best.mr || cycles<T>(m, n, tile) < cycles<T>(m, n, best) * 0.99))
            best = tile;
    return best;
}

}  // namespace shardwise
