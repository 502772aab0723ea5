// Batch norm in training, with the ReLU that follows it: two passes over the data each way.
#pragma once

#include <cmath>
#include <vector>

#include "problem.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace shardwise {

struct Images {
    i64 n, c, pixels;  // of one channel of one image
    i64 last, threads;
    i64 count() const { return n * pixels; }
};

// Runs of at most this many elements are added in the tensor's own precision, their sums in double.
constexpr i64 norm_run = 256;

// Calls work(offset, channel, count) for contiguous runs of one channel, or, channels last,
// work(offset, channel, pixels) for one vector of channels over so many pixels. The last argument is
// the thread.
template <class T, class Work> void each_run(const Images& g, Work work) {
    constexpr int L = lanes<T>;
    parallel((int)g.threads, [&](int index, int total) {
        if (!g.last) {
            const Range mine = part(g.c, 1, index, total);
            for (i64 c = mine.begin; c < mine.end; c++)
                for (i64 n = 0; n < g.n; n++)
                    for (i64 at = 0; at < g.pixels; at += norm_run)
                        work((n * g.c + c) * g.pixels + at, c, std::min(norm_run, g.pixels - at),
                             index);
            return;
        }
        const Range mine = part(g.count(), norm_run, index, total);
        for (i64 at = mine.begin; at < mine.end; at += norm_run)
            for (i64 c = 0; c < g.c; c += L)
                work(at * g.c + c, c, std::min(norm_run, mine.end - at), index);
    });
}

// The vectors of one run: visit(offset, lanes in use, first channel), planar ones along the pixels.
template <class T, class Visit>
inline __attribute__((always_inline)) void vectors_of(const Images& g, i64 offset, i64 channel,
                                                      i64 count, Visit visit) {
    constexpr int L = lanes<T>;
    if (!g.last) {
        i64 i = 0;
        for (; i + L <= count; i += L) visit(offset + i, L);
        if (i < count) visit(offset + i, count - i);
    } else {
        const i64 used = std::min<i64>(L, g.c - channel);
        for (i64 i = 0; i < count; i++) visit(offset + i * g.c, used);
    }
}

template <class T> inline vec<T> read(const T* p, i64 used) {
    return used == lanes<T> ? load(p) : load_part(p, used);
}
template <class T> inline void put(T* p, vec<T> v, i64 used) {
    if (used == lanes<T>) store(p, v);
    else store_part(p, v, used);
}

// One number per channel as a vector: the same in all lanes (planar), or one for each lane.
template <class T> inline vec<T> of_channel(const Images& g, const T* values, i64 channel) {
    if (!g.last) return vec<T>{} + values[channel];
    return load_part(values + channel, std::min<i64>(lanes<T>, g.c - channel));
}

// Adds the lanes of a and b to the totals of their channels.
template <class T>
inline void add_lanes(const Images& g, i64 channel, vec<T> a, vec<T> b, double* totals) {
    for (int lane = 0; lane < lanes<T>; lane++) {
        const i64 c = g.last ? channel + lane : channel;
        if (c < g.c) totals[2 * c] += a[lane], totals[2 * c + 1] += b[lane];
    }
}

// Two sums for each channel of what `terms` makes of each vector.
template <class T, class Terms> std::vector<double> sums(const Images& g, Terms terms) {
    std::vector<double> totals((std::size_t)(g.threads * g.c * 2));
    each_run<T>(g, [&](i64 offset, i64 channel, i64 count, int index) {
        vec<T> a = {}, b = {};
        const auto add_to = terms(channel);
        vectors_of<T>(g, offset, channel, count,
                      [&](i64 at, i64 used) { add_to(at, used, a, b); });
        add_lanes<T>(g, channel, a, b, totals.data() + index * g.c * 2);
    });
    for (i64 t = 1; t < g.threads; t++)
        for (i64 i = 0; i < 2 * g.c; i++) totals[i] += totals[t * g.c * 2 + i];
    return totals;
}

// Lanes that a partial vector does not use hold zeros; a shift would make them count.
template <class T> inline vec<T> only(vec<T> v, i64 used) {
    if (used == lanes<T>) return v;
    for (i64 lane = used; lane < lanes<T>; lane++) v[lane] = 0;
    return v;
}

template <class T>
void norm_forward(const Images& g, const T* x, const T* weight, const T* bias, double eps, bool relu,
                  T* y, T* mean, T* inverse) {
    // Sums of differences from a value of the channel: no digits are lost to a large mean.
    std::vector<T> shift((std::size_t)g.c), scale(shift), offset(shift);
    for (i64 c = 0; c < g.c; c++) shift[c] = x[g.last ? c : c * g.pixels];
    const auto totals = sums<T>(g, [&](i64 channel) {
        const vec<T> base = of_channel(g, shift.data(), channel);
        return [=](i64 at, i64 used, vec<T>& a, vec<T>& b) {
            const vec<T> v = only<T>(read(x + at, used) - base, used);
            a += v;
            b += v * v;
        };
    });
    for (i64 c = 0; c < g.c; c++) {
        const double average = totals[2 * c] / g.count();
        const double variance = totals[2 * c + 1] / g.count() - average * average;
        mean[c] = (T)(shift[c] + average);
        inverse[c] = (T)(1 / std::sqrt((variance > 0 ? variance : 0) + eps));
        scale[c] = (weight ? weight[c] : T(1)) * inverse[c];
        offset[c] = (bias ? bias[c] : T(0)) - mean[c] * scale[c];
    }
    each_run<T>(g, [&](i64 start, i64 channel, i64 count, int) {
        const vec<T> s = of_channel(g, scale.data(), channel);
        const vec<T> o = of_channel(g, offset.data(), channel);
        vectors_of<T>(g, start, channel, count, [&](i64 at, i64 used) {
            vec<T> v = read(x + at, used) * s + o;
            if (relu) v = v > 0 ? v : vec<T>{};
            put<T>(y + at, v, used);
        });
    });
}

// dy is masked where the ReLU was 0; y tells.
template <class T>
void norm_backward(const Images& g, const T* dy, const T* x, const T* y, const T* weight,
                   const T* mean, const T* inverse, T* dx, T* dweight, T* dbias) {
    auto error = [=](i64 at, i64 used) {
        const vec<T> d = read(dy + at, used);
        return y ? (read(y + at, used) > 0 ? d : vec<T>{}) : d;
    };
    const auto totals = sums<T>(g, [&](i64 channel) {
        const vec<T> m = of_channel(g, mean, channel);
        return [=](i64 at, i64 used, vec<T>& a, vec<T>& b) {
            const vec<T> d = error(at, used);  // 0 in lanes that are not used
            a += d;
            b += d * (read(x + at, used) - m);
        };
    });
    std::vector<T> by_error((std::size_t)g.c), by_x(by_error), constant(by_error);
    for (i64 c = 0; c < g.c; c++) {
        const double s = totals[2 * c], t = totals[2 * c + 1] * inverse[c];
        dbias[c] = (T)s;
        dweight[c] = (T)t;
        const double factor = (weight ? weight[c] : T(1)) * (double)inverse[c];
        const double slope = -factor * t / g.count() * inverse[c];
        by_error[c] = (T)factor;
        by_x[c] = (T)slope;
        constant[c] = (T)(-factor * s / g.count());
    }
    each_run<T>(g, [&](i64 start, i64 channel, i64 count, int) {
        const vec<T> e = of_channel(g, by_error.data(), channel), m = of_channel(g, mean, channel);
        const vec<T> s = of_channel(g, by_x.data(), channel);
        const vec<T> k = of_channel(g, constant.data(), channel);
        vectors_of<T>(g, start, channel, count, [&](i64 at, i64 used) {
            put<T>(dx + at, error(at, used) * e + (read(x + at, used) - m) * s + k, used);
        });
    });
}

}  // namespace shardwise
