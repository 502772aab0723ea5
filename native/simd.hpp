// Compiler vectors: one source for AVX-512, AVX2 and any other CPU. The flags decide the width.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define SW_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SW_VECTOR_BYTES 32
#else
#define SW_VECTOR_BYTES 16
#endif

namespace shardwise {

using i64 = std::int64_t;

template <class T> struct Simd {
    typedef T vec __attribute__((vector_size(SW_VECTOR_BYTES)));
    static constexpr int lanes = SW_VECTOR_BYTES / sizeof(T);
};
template <class T> using vec = typename Simd<T>::vec;
template <class T> constexpr int lanes = Simd<T>::lanes;

template <class T> inline __attribute__((always_inline)) vec<T> load(const T* p) {
    vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class T> inline __attribute__((always_inline)) void store(T* p, vec<T> v) {
    std::memcpy(p, &v, sizeof v);
}

template <class T> inline vec<T> load_part(const T* p, i64 count) {
    vec<T> v = {};
    std::memcpy(&v, p, count * sizeof(T));
    return v;
}

#if defined(__AVX512F__)
template <> inline vec<float> load_part(const float* p, i64 count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
template <> inline vec<double> load_part(const double* p, i64 count) {
    return _mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), p);
}
#endif

template <class T> inline void store_part(T* p, vec<T> v, i64 count) {
    std::memcpy(p, &v, count * sizeof(T));
}

#if defined(__AVX512F__)
template <> inline void store_part(float* p, vec<float> v, i64 count) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), v);
}
template <> inline void store_part(double* p, vec<double> v, i64 count) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << count) - 1), v);
}
#endif

// Negative numbers become 0; a NaN stays one, as with torch.
template <class T> inline __attribute__((always_inline)) vec<T> relu_of(vec<T> v) {
    return v < 0 ? vec<T>{} : v;
}

// Runs of im2col are short (1 to 56 elements), too short for a call of memset or memcpy.
template <class T> inline void fill_zero(T* p, i64 count) {
    constexpr int L = lanes<T>;
    i64 i = 0;
    for (; i + L <= count; i += L) store(p + i, vec<T>{});
    if (i < count) store_part(p + i, vec<T>{}, count - i);
}

template <class T> inline void copy(T* to, const T* from, i64 count) {
    constexpr int L = lanes<T>;
    i64 i = 0;
    for (; i + L <= count; i += L) store(to + i, load(from + i));
    if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

template <class T> inline void add(T* to, const T* from, i64 count) {
    constexpr int L = lanes<T>;
    i64 i = 0;
    for (; i + L <= count; i += L) store(to + i, load(to + i) + load(from + i));
    for (; i < count; i++) to[i] += from[i];
}

template <class T> struct Index;
template <> struct Index<float> { using type = std::int32_t; };
template <> struct Index<double> { using type = std::int64_t; };

template <class T, int... I> inline __attribute__((always_inline)) vec<T> pick(vec<T> a, vec<T> b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    using Int = typename Index<T>::type;
    typedef Int ivec __attribute__((vector_size(SW_VECTOR_BYTES)));
    return __builtin_shuffle(a, b, (ivec){I...});
#endif
}

template <class T, int Step, std::size_t... I>
inline __attribute__((always_inline)) void exchange(vec<T>& a, vec<T>& b,
                                                    std::index_sequence<I...>) {
    constexpr int L = lanes<T>;
    vec<T> low = pick<T, ((int(I) & Step) ? L + int(I) - Step : int(I))...>(a, b);
    b = pick<T, ((int(I) & Step) ? L + int(I) : int(I) + Step)...>(a, b);
    a = low;
}

template <class T, int Step> inline __attribute__((always_inline)) void transpose_step(vec<T>* r) {
    constexpr int L = lanes<T>;
    if constexpr (Step < L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; i++)
            if (!(i & Step)) exchange<T, Step>(r[i], r[i + Step], std::make_index_sequence<L>());
        transpose_step<T, Step * 2>(r);
    }
}

// lanes x lanes in registers: log2(lanes) exchanges of ever larger blocks.
template <class T> inline __attribute__((always_inline)) void transpose(vec<T>* r) {
    transpose_step<T, 1>(r);
}

template <class T, std::size_t... I>
inline vec<T> even_lanes(vec<T> a, vec<T> b, std::index_sequence<I...>) {
    return pick<T, (2 * int(I))...>(a, b);
}

// to[i] = from[i * stride]
template <class T> inline void copy_strided(T* to, const T* from, i64 count, i64 stride) {
    if (stride == 1) return copy(to, from, count);
    constexpr int L = lanes<T>;
    i64 i = 0;
    if (stride == 2)  // i + L < count: the last element read is one that is wanted, or lies before
        for (; i + L < count; i += L)
            store(to + i, even_lanes<T>(load(from + 2 * i), load(from + 2 * i + L),
                                        std::make_index_sequence<L>()));
    for (; i < count; i++) to[i] = from[i * stride];
}

// to[j * to_stride + i] = from[i * from_stride + j], i < rows, j < cols.
// A column of fewer than `pad` rows is filled up with zeros to `pad`.
template <class T>
inline void transpose_block(const T* from, i64 from_stride, i64 rows, i64 cols, T* to,
                            i64 to_stride, i64 pad) {
    constexpr int L = lanes<T>;
    for (i64 i0 = 0; i0 < pad; i0 += L) {
        const i64 in = rows - i0 < L ? (rows > i0 ? rows - i0 : 0) : L;
        const i64 out = pad - i0 < L ? pad - i0 : L;
        for (i64 j0 = 0; j0 < cols; j0 += L) {
            const i64 jn = cols - j0 < L ? cols - j0 : L;
            const T* source = from + i0 * from_stride + j0;
            vec<T> r[L];
            if (jn == L && in == L) {
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) r[i] = load(source + i * from_stride);
            } else {
                for (int i = 0; i < L; i++)
                    r[i] = i < in ? load_part(source + i * from_stride, jn) : vec<T>{};
            }
            transpose<T>(r);
            T* target = to + j0 * to_stride + i0;
            if (out == L && jn == L) {
#pragma GCC unroll 16
                for (int j = 0; j < L; j++) store(target + j * to_stride, r[j]);
            } else {
                for (int j = 0; j < jn; j++) store_part(target + j * to_stride, r[j], out);
            }
        }
    }
}

}  // namespace shardwise
