// Winograd's F(m x m, 3 x 3), one dimension of its transforms, and how to apply them to both.
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

}  // namespace shardwise
