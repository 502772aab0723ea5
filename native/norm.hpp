// Batch norm in training, with the ReLU that follows it: two passes over the data each way.
#pragma once

#include <cmath>
#include <vector>

#include "problem.hpp"
#include "threads.hpp"

namespace shardwise {

struct Images {
    i64 n, c, pixels;  // of one channel of one image
    i64 last, threads;
    i64 count() const { return n * pixels; }
};

// So many vectors are added in the tensor's own precision, their sums in double.
constexpr i64 norm_run = 64;
constexpr int norm_group = 4;  // vectors side by side: one alone would wait for its last sum

// V vectors side by side, `steps` times; the last of them may have fewer lanes in use.
template <int V> struct Strip {
    static constexpr int vectors = V;
    i64 offset, step, steps, channel;
    i64 used;
};

// Planar: the run [begin, end) of one channel, from `base`.
template <class T, class Work>
inline void planar_strips(i64 base, i64 begin, i64 end, i64 channel, Work& work) {
    constexpr i64 L = lanes<T>, wide = norm_group * L;
    i64 at = begin;
    while (end - at >= wide) {
        const i64 steps = std::min(norm_run, (end - at) / wide);
        work(Strip<norm_group>{base + at, wide, steps, channel, L});
        at += steps * wide;
    }
    if (end - at >= L) {
        work(Strip<1>{base + at, L, (end - at) / L, channel, L});
        at += (end - at) / L * L;
    }
    if (at < end) work(Strip<1>{base + at, L, 1, channel, end - at});
}

// Channels last: all channels of the pixels [begin, begin + steps).
template <class T, class Work>
inline void last_strips(const Images& g, i64 begin, i64 steps, Work& work) {
    constexpr i64 L = lanes<T>, wide = norm_group * L;
    i64 c = 0;
    for (; c + wide <= g.c; c += wide)
        work(Strip<norm_group>{begin * g.c + c, g.c, steps, c, L});
    for (; c < g.c; c += L)
        work(Strip<1>{begin * g.c + c, g.c, steps, c, std::min(L, g.c - c)});
}

// make(thread) gives what is called with every strip of a thread's share.
template <class T, class Make> void each_strip(const Images& g, Make make) {
    parallel((int)g.threads, [&](int index, int total) {
        auto work = make(index);
        if (g.last) {
            const Range mine = part(g.count(), 1, index, total);
            for (i64 at = mine.begin; at < mine.end; at += norm_run)
                last_strips<T>(g, at, std::min(norm_run, mine.end - at), work);
            return;
        }
        const Range mine = part(g.c, 1, index, total);
        for (i64 c = mine.begin; c < mine.end; c++)
            for (i64 n = 0; n < g.n; n++)
                planar_strips<T>((n * g.c + c) * g.pixels, 0, g.pixels, c, work);
    });
}

template <class T> inline vec<T> read(const T* p, i64 used) {
    return used == lanes<T> ? load(p) : load_part(p, used);
}
template <class T> inline void put(T* p, vec<T> v, i64 used) {
    if (used == lanes<T>) store(p, v);
    else store_part(p, v, used);
}

// One number per channel for each vector of a strip: the same in all lanes (planar), or one each.
template <class T, int V> struct PerChannel {
    vec<T> of[V];
    PerChannel(const Images& g, const T* values, const Strip<V>& s) {
        for (int v = 0; v < V; v++)
            of[v] = g.last ? read(values + s.channel + v * lanes<T>, s.used)
                           : vec<T>{} + values[s.channel];
    }
};

// visit(offset, v) for every vector of a strip.
template <class T, int V, class Visit>
inline __attribute__((always_inline)) void vectors_of(const Strip<V>& s, Visit visit) {
    for (i64 i = 0; i < s.steps; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) visit(s.offset + i * s.step + v * lanes<T>, v);
}

// Two sums for each channel: terms(strip) gives what adds to a and b at an offset of the strip.
template <class T, class Terms> std::vector<double> sums(const Images& g, Terms terms) {
    std::vector<double> totals((std::size_t)(g.threads * g.c * 2));
    each_strip<T>(g, [&](int index) {
        double* mine = totals.data() + index * g.c * 2;
        return [&g, mine, &terms](const auto& s) {
            constexpr int V = std::decay_t<decltype(s)>::vectors;
            vec<T> a[V] = {}, b[V] = {};
            const auto add_to = terms(s);
            vectors_of<T>(s, [&](i64 at, int v) { add_to(at, v, a[v], b[v]); });
            if (!g.last)
                for (int v = 1; v < V; v++) a[0] += a[v], b[0] += b[v];
            for (int v = 0; v < (g.last ? V : 1); v++)
                for (i64 lane = 0; lane < s.used; lane++) {
                    const i64 c = g.last ? s.channel + v * lanes<T> + lane : s.channel;
                    mine[2 * c] += a[v][lane], mine[2 * c + 1] += b[v][lane];
                }
        };
    });
    for (i64 t = 1; t < g.threads; t++)
        for (i64 i = 0; i < 2 * g.c; i++) totals[i] += totals[t * g.c * 2 + i];
    return totals;
}

template <class T> struct Norm {
    const T *weight, *bias;  // or null
    T *mean, *inverse;       // of this batch: 1 / sqrt(variance + eps)

    // y = x * scale + offset
    std::vector<T> scale(const Images& g) const {
        std::vector<T> out(inverse, inverse + g.c);
        for (i64 c = 0; weight && c < g.c; c++) out[c] *= weight[c];
        return out;
    }
    std::vector<T> offset(const Images& g, const std::vector<T>& scale) const {
        std::vector<T> out((std::size_t)g.c);
        for (i64 c = 0; c < g.c; c++) out[c] = (bias ? bias[c] : T(0)) - mean[c] * scale[c];
        return out;
    }
};

// What a module keeps of all batches; null pointers where it keeps nothing.
template <class T> struct Running {
    T *mean, *variance;
    double momentum;

    void update(i64 c, double new_mean, double new_variance, i64 count) const {
        if (!mean) return;
        const double unbiased = count > 1 ? new_variance * count / (count - 1) : new_variance;
        mean[c] = (T)(mean[c] + momentum * (new_mean - mean[c]));
        variance[c] = (T)(variance[c] + momentum * (unbiased - variance[c]));
    }
};

struct Moments {
    double mean, variance;
};

// Of one channel, all in double, first the mean and then the squares around it, as torch does.
template <class T> Moments moments_of(const Images& g, const T* x, i64 channel) {
    auto average = [&](auto term) {
        double sum = 0;
        for (i64 n = 0; n < g.n; n++)
            for (i64 i = 0; i < g.pixels; i++)
                sum += term((double)x[g.last ? (n * g.pixels + i) * g.c + channel
                                             : (n * g.c + channel) * g.pixels + i]);
        return sum / g.count();
    };
    const double mean = average([](double value) { return value; });
    return {mean, average([mean](double value) { return (value - mean) * (value - mean); })};
}

// The mean and spread of every channel, and what a module keeps of them.
template <class T>
void norm_statistics(const Images& g, const T* x, const Norm<T>& norm, const Running<T>& running,
                     double eps) {
    // Sums of differences from a value of the channel: no digits are lost to a large mean.
    std::vector<T> shift((std::size_t)g.c);
    for (i64 c = 0; c < g.c; c++) shift[c] = x[g.last ? c : c * g.pixels];
    const auto totals = sums<T>(g, [&](const auto& s) {
        const PerChannel base(g, shift.data(), s);
        return [=, &s](i64 at, int v, vec<T>& a, vec<T>& b) {
            const vec<T> d = read(x + at, s.used) - base.of[v];
            a += d;  // lanes that are not in use are not added up
            b += d * d;
        };
    });
    for (i64 c = 0; c < g.c; c++) {
        const double average = totals[2 * c] / g.count();
        const double spread = totals[2 * c + 1] / g.count() - average * average;
        // A NaN, an infinity, or squares too large for T: none of them may get lost here.
        const Moments found = std::isfinite(spread)
                                  ? Moments{shift[c] + average, spread > 0 ? spread : 0}
                                  : moments_of(g, x, c);
        norm.mean[c] = (T)found.mean;
        norm.inverse[c] = (T)(1 / std::sqrt(found.variance + eps));
        running.update(c, found.mean, found.variance, g.count());
    }
}

template <class T>
void norm_forward(const Images& g, const T* x, const Norm<T>& norm, const Running<T>& running,
                  double eps, bool relu, T* y) {
    norm_statistics(g, x, norm, running, eps);
    const std::vector<T> scale = norm.scale(g), offset = norm.offset(g, scale);
    each_strip<T>(g, [&](int) {
        return [&](const auto& s) {
            const PerChannel by(g, scale.data(), s), to(g, offset.data(), s);
            vectors_of<T>(s, [&](i64 at, int v) {
                vec<T> value = read(x + at, s.used) * by.of[v] + to.of[v];
                if (relu) value = relu_of<T>(value);
                put<T>(y + at, value, s.used);
            });
        };
    });
}

// With `relu`, dy does not count where y was 0: y is computed again, just as it was before.
template <class T> struct Errors {
    const Images& g;
    const T* dy;
    const T *scale, *offset;
    bool relu;

    template <int V> auto of(const Strip<V>& s) const {
        const PerChannel by(g, scale, s), to(g, offset, s);
        return [=, &s, dy = dy, relu = relu](i64 at, int v, vec<T> value) {
            const vec<T> d = read(dy + at, s.used);
            return relu ? (value * by.of[v] + to.of[v] <= 0 ? vec<T>{} : d) : d;
        };
    }
};

// dx, dweight and dbias, where for each channel the sums of its errors, and of them times x - mean,
// are known. dx may be where the errors are.
template <class T>
void norm_gradients(const Images& g, const Errors<T>& errors, const T* x, const Norm<T>& norm,
                    const std::vector<double>& totals, T* dx, T* dweight, T* dbias) {
    std::vector<T> by_x((std::size_t)g.c), constant(by_x);
    for (i64 c = 0; c < g.c; c++) {
        const double s = totals[2 * c], t = totals[2 * c + 1] * norm.inverse[c];
        dbias[c] = (T)s;
        dweight[c] = (T)t;
        by_x[c] = (T)(-errors.scale[c] * t / g.count() * norm.inverse[c]);
        constant[c] = (T)(-errors.scale[c] * s / g.count());
    }
    each_strip<T>(g, [&](int) {
        return [&](const auto& s) {
            const PerChannel by_error(g, errors.scale, s), mean(g, norm.mean, s);
            const PerChannel slope(g, by_x.data(), s), rest(g, constant.data(), s);
            const auto error = errors.of(s);
            vectors_of<T>(s, [&](i64 at, int v) {
                const vec<T> value = read(x + at, s.used);
                put<T>(dx + at, error(at, v, value) * by_error.of[v] +
                                    (value - mean.of[v]) * slope.of[v] + rest.of[v], s.used);
            });
        };
    });
}

template <class T>
void norm_backward(const Images& g, const T* dy, const T* x, const Norm<T>& norm, bool relu, T* dx,
                   T* dweight, T* dbias) {
    const std::vector<T> scale = norm.scale(g), offset = norm.offset(g, scale);
    const Errors<T> errors{g, dy, scale.data(), offset.data(), relu};
    const auto totals = sums<T>(g, [&](const auto& s) {
        const PerChannel mean(g, norm.mean, s);
        return [=, &s, error = errors.of(s)](i64 at, int v, vec<T>& a, vec<T>& b) {
            const vec<T> value = read(x + at, s.used), d = error(at, v, value);
            a += d;
            b += d * (value - mean.of[v]);
        };
    });
    norm_gradients(g, errors, x, norm, totals, dx, dweight, dbias);
}

}  // namespace shardwise
