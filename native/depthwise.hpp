// One filter for each channel: nothing to multiply as matrices, so plain loops over rows or
// channels.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// Calls work(x row, y row, tap, count) for each tap and output row of one planar image's channel.
template <class Work> inline void each_planar_tap(const Problem& g, Work work) {
    const std::vector<Shift> taps = shifts_of(g);
    Pixel at = {};
    for (i64 y = 0; y < g.pixels(); y += g.q, next_line(g, at))
        for (i64 i = 0; i < g.taps(); i++) {
            const Shift& tap = taps[i];
            const i64 line = line_of(g, corner_of(g, at), tap);
            const Span ok = tap.columns;
            if (line >= 0 && ok.begin < ok.end)
                work(line * g.w + ok.begin * g.stride_w + tap.right, y + ok.begin, i,
                     ok.end - ok.begin);
        }
}

// Calls work(x pixel, y pixel, tap) for each tap and output pixel of one image.
template <class Work> inline void each_tap(const Problem& g, Work work) {
    const std::vector<Shift> taps = shifts_of(g);
    Pixel at = {};
    for (i64 y = 0; y < g.pixels(); y++, next_pixel(g, at)) {
        const Pixel corner = corner_of(g, at);
        for (i64 i = 0; i < g.taps(); i++) {
            const i64 in = input_of(g, corner, taps[i]);
            if (in >= 0) work(in, y, i);
        }
    }
}

template <class T>
inline void multiply_add(T* to, i64 by_to, const T* from, i64 by_from, T factor, i64 count) {
    if (by_to == 1 && by_from == 1)
        for (i64 i = 0; i < count; i++) to[i] += factor * from[i];
    else
        for (i64 i = 0; i < count; i++) to[i * by_to] += factor * from[i * by_from];
}

// The filters as [tap][channel], whatever their layout.
template <class T> inline void filters_by_tap(const Problem& g, const T* w, T* to) {
    for (i64 c = 0; c < g.c; c++)
        for (i64 tap = 0; tap < g.taps(); tap++) to[tap * g.c + c] = w[c * g.taps() + tap];
}

template <class T> void depthwise_forward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    T* by_tap = scratch.take<T>(g.taps() * g.c);
    if (scratch.measuring()) return;
    filters_by_tap(g, t.w, by_tap);
    const i64 in = g.inputs(), out = g.pixels();
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.last ? g.n : g.n * g.c, 1, index, total);
        for (i64 job = mine.begin; job < mine.end; job++) {
            if (!g.last) {
                T* y = t.out + job * out;
                const T bias = t.bias ? t.bias[job % g.c] : T(0);
                for (i64 i = 0; i < out; i++) y[i] = bias;
                each_planar_tap(g, [&](i64 x_at, i64 y_at, i64 tap, i64 count) {
                    multiply_add(y + y_at, 1, t.x + job * in + x_at, g.stride_w,
                                 by_tap[tap * g.c + job % g.c], count);
                });
                for (i64 i = 0; g.relu && i < out; i++) y[i] = y[i] < 0 ? T(0) : y[i];
                continue;
            }
            T* y = t.out + job * out * g.c;
            for (i64 i = 0; i < out; i++)
                for (i64 c = 0; c < g.c; c++) y[i * g.c + c] = t.bias ? t.bias[c] : T(0);
            each_tap(g, [&](i64 x_at, i64 y_at, i64 tap) {
                const T *x = t.x + (job * in + x_at) * g.c, *w = by_tap + tap * g.c;
                for (i64 c = 0; c < g.c; c++) y[y_at * g.c + c] += w[c] * x[c];
            });
            for (i64 i = 0; g.relu && i < out * g.c; i++) y[i] = y[i] < 0 ? T(0) : y[i];
        }
    });
}

template <class T> void depthwise_backward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    T* by_tap = scratch.take<T>(g.taps() * g.c);
    if (scratch.measuring()) return;
    filters_by_tap(g, t.w, by_tap);
    const i64 in = g.inputs(), out = g.pixels();
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.last ? g.n : g.n * g.c, 1, index, total);
        for (i64 job = mine.begin; job < mine.end; job++) {
            if (!g.last) {
                T* dx = t.out + job * in;
                fill_zero(dx, in);
                each_planar_tap(g, [&](i64 x_at, i64 y_at, i64 tap, i64 count) {
                    multiply_add(dx + x_at, g.stride_w, t.y + job * out + y_at, 1,
                                 by_tap[tap * g.c + job % g.c], count);
                });
                continue;
            }
            T* dx = t.out + job * in * g.c;
            fill_zero(dx, in * g.c);
            each_tap(g, [&](i64 x_at, i64 y_at, i64 tap) {
                const T *dy = t.y + (job * out + y_at) * g.c, *w = by_tap + tap * g.c;
                for (i64 c = 0; c < g.c; c++) dx[x_at * g.c + c] += w[c] * dy[c];
            });
        }
    });
}

// Threads own channels, so that no sum is shared.
template <class T> void depthwise_filter(const Problem& g, Tensors<T> t, Scratch& scratch) {
    T* by_tap = scratch.take<T>(g.taps() * g.c);
    if (scratch.measuring()) return;
    fill_zero(by_tap, g.taps() * g.c);
    const i64 in = g.inputs(), out = g.pixels();
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.c, lanes<T>, index, total);
        for (i64 image = 0; image < g.n; image++) {
            if (g.last) {
                each_tap(g, [&](i64 x_at, i64 y_at, i64 tap) {
                    const T* x = t.x + (image * in + x_at) * g.c;
                    const T* dy = t.y + (image * out + y_at) * g.c;
                    T* dw = by_tap + tap * g.c;
                    for (i64 c = mine.begin; c < mine.end; c++) dw[c] += x[c] * dy[c];
                });
                continue;
            }
            for (i64 c = mine.begin; c < mine.end; c++)
                each_planar_tap(g, [&](i64 x_at, i64 y_at, i64 tap, i64 count) {
                    const T* x = t.x + (image * g.c + c) * in + x_at;
                    const T* dy = t.y + (image * g.c + c) * out + y_at;
                    T sum = 0;
                    for (i64 i = 0; i < count; i++) sum += x[i * g.stride_w] * dy[i];
                    by_tap[tap * g.c + c] += sum;
                });
        }
    });
    for (i64 c = 0; c < g.c; c++)
        for (i64 tap = 0; tap < g.taps(); tap++) t.out[c * g.taps() + tap] = by_tap[tap * g.c + c];
}

inline bool depthwise_takes(const Problem& g, int) { return g.groups == g.c && g.f == g.c; }

}  // namespace shardwise
