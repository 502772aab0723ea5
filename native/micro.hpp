// Micro-kernels: a tile of mr rows x nv vectors of C stays in registers over the whole k loop.
//
// packed: a[p * lda + i] is broadcast, b[p * ldb + j] is a row of vectors.
// rows:   a comes from one pointer per row, so that A needs no packing; k is cut into segments
//         (the taps of a filter), each with its own pointers.
// offset: both operands are found through tables of offsets, one per p.
// stretches: k is cut into lines of an image, and a lies in the image: by_i and by_p apart.
#pragma once

#include <array>

#include "simd.hpp"

namespace shardwise {

// Accumulators that leave registers for a row of B and a broadcast element of A.
#if defined(__AVX512F__)
constexpr int max_tile = 28, max_mr = 14, max_nv = 4;
#elif defined(__AVX2__)
constexpr int max_tile = 12, max_mr = 6, max_nv = 3;
#elif defined(__ARM_NEON)
constexpr int max_tile = 24, max_mr = 8, max_nv = 4;
#else
constexpr int max_tile = 12, max_mr = 6, max_nv = 3;
#endif

struct Stretch {
    i64 a, p, length;  // where it begins: an offset in the image, and a row of B
};

template <class T> struct Target {
    T* c;
    i64 ldc;
    bool accumulate;
};

template <class T, int MR, int NV>
inline __attribute__((always_inline)) void put(vec<T> (&acc)[MR][NV], const Target<T>& to) {
    constexpr int L = lanes<T>;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            T* c = to.c + i * to.ldc + v * L;
            store(c, to.accumulate ? load(c) + acc[i][v] : acc[i][v]);
        }
}

template <class T, int MR, int NV> struct Micro {
    static constexpr int L = lanes<T>;

    template <class Get>
    static inline __attribute__((always_inline)) void step(vec<T> (&acc)[MR][NV], const T* b,
                                                           Get a) {
        vec<T> row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) row[v] = load(b + v * L);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const T x = a(i);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[i][v] += row[v] * x;
        }
    }

    static void packed(i64 k, const T* a, i64 lda, const T* b, i64 ldb, const Target<T>& to) {
        vec<T> acc[MR][NV] = {};
        for (i64 p = 0; p < k; p++, a += lda, b += ldb) step(acc, b, [a](int i) { return a[i]; });
        put<T, MR, NV>(acc, to);
    }

    // rows[t * stride + i]: where segment t of row i begins.
    static void rows(i64 segments, i64 length, const T* const* rows, i64 stride, const T* b,
                     i64 ldb, const Target<T>& to) {
        vec<T> acc[MR][NV] = {};
        for (i64 t = 0; t < segments; t++, rows += stride) {
            const T* a[MR];
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) a[i] = rows[i];
            for (i64 p = 0; p < length; p++, b += ldb)
                step(acc, b, [&a, p](int i) { return a[i][p]; });
        }
        put<T, MR, NV>(acc, to);
    }

    static void offset(i64 k, const T* a, const i64* a_at, const T* b, const i64* b_at,
                       const Target<T>& to) {
        vec<T> acc[MR][NV] = {};
        for (i64 p = 0; p < k; p++) {
            const T* row = a + a_at[p];
            step(acc, b + b_at[p], [row](int i) { return row[i]; });
        }
        put<T, MR, NV>(acc, to);
    }

    static void stretches(i64 count, const Stretch* stretches, const T* a, i64 by_i, i64 by_p,
                          const T* b, i64 ldb, const Target<T>& to) {
        vec<T> acc[MR][NV] = {};
        for (i64 t = 0; t < count; t++) {
            const T *line = a + stretches[t].a, *row = b + stretches[t].p * ldb;
            if (by_i == 1) {  // one pointer instead of MR
                for (i64 p = 0; p < stretches[t].length; p++, line += by_p, row += ldb)
                    step(acc, row, [line](int i) { return line[i]; });
                continue;
            }
            const T* lines[MR];
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) lines[i] = line + i * by_i;
            const i64 end = stretches[t].length * by_p;
            for (i64 p = 0; p < end; p += by_p, row += ldb)
                step(acc, row, [&lines, p](int i) { return lines[i][p]; });
        }
        put<T, MR, NV>(acc, to);
    }
};

template <class T> struct Kernels {
    decltype(&Micro<T, 1, 1>::packed) packed;
    decltype(&Micro<T, 1, 1>::rows) rows;
    decltype(&Micro<T, 1, 1>::offset) offset;
    decltype(&Micro<T, 1, 1>::stretches) stretches;
};

template <class T, int MR, int NV> constexpr Kernels<T> kernels_of() {
    if constexpr (MR * NV <= max_tile)
        return {&Micro<T, MR, NV>::packed, &Micro<T, MR, NV>::rows, &Micro<T, MR, NV>::offset,
                &Micro<T, MR, NV>::stretches};
    else
        return {nullptr, nullptr, nullptr, nullptr};
}

template <class T, std::size_t... I>
constexpr std::array<Kernels<T>, sizeof...(I)> kernel_table(std::index_sequence<I...>) {
    return {kernels_of<T, int(I) / max_nv + 1, int(I) % max_nv + 1>()...};
}

// The kernel of an mr x nv tile; edges of C have smaller tiles, so no work is done on padding rows.
template <class T> inline const Kernels<T>& micro(int mr, int nv) {
    static constexpr auto table =
        kernel_table<T>(std::make_index_sequence<max_mr * max_nv>());
    return table[(mr - 1) * max_nv + nv - 1];
}

}  // namespace shardwise
