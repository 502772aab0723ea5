// Batch norm in training, its ReLU and a pointwise convolution of channels-last images as one: what
// is normalised lies only in the blocks that the loop nest has at hand, and is never written.
#pragma once

#include "convgemm.hpp"
#include "norm.hpp"

namespace shardwise {

inline Images images_of(const Problem& g) { return {g.n, g.c, g.inputs(), g.last, g.threads}; }

// ReLU(x * scale + offset), for each channel its own.
template <class T> struct Normalised {
    const T* x;
    i64 ld;
    const T *scale, *offset;

    void copy(T* to, i64 row, i64 channel, i64 count) const {
        const T* from = x + row * ld + channel;
        for (i64 t = 0; t < count; t += lanes<T>) {
            const i64 used = std::min<i64>(lanes<T>, count - t), c = channel + t;
            put<T>(to + t, relu_of<T>(read(from + t, used) * read(scale + c, used) +
                                      read(offset + c, used)), used);
        }
    }
};

// Forward: a block of pixels, normalised; i = pixel, k = channel.
template <class T> struct NormalisedRows {
    Normalised<T> source;
    T* buffer;
    i64 stride;

    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        segments = 1, length = kb;
        for (i64 t = 0; t < mb; t++) {
            source.copy(buffer + t * stride, i + t, k, kb);
            table[t] = buffer + t * stride;
        }
    }
};

// dw: the same transposed; i = channel, k = pixel.
template <class T> struct NormalisedColumns {
    Normalised<T> source;

    void pack_all(i64 i, i64 total, i64 k, i64 kb, i64 width, T* to) const {
        for (i64 p = 0; p < kb; p++)
            for (i64 j = 0; j < total; j += width) {
                const i64 count = std::min(width, total - j);
                T* row = to + j * kb + p * width;
                source.copy(row, k + p, i + j, count);
                if (count < width) fill_zero(row + count, width - count);
            }
    }
};

// dx of the convolution, which is the norm's error: 0 where the ReLU was, and summed up while the
// tile is in the first-level cache. `errors` and `products` have room for whole vectors.
template <class T> struct ErrorsC : MatrixC<T> {
    Normalised<T> source;
    const T* mean;
    double *errors, *products;

    void finish(i64 i, i64 j, int m, i64 n) const {
        for (i64 c = j; c < j + n; c += lanes<T>) column(i, c, m, std::min<i64>(lanes<T>, j + n - c));
    }
    void column(i64 i, i64 c, int m, i64 used) const {
        const vec<T> by = read(source.scale + c, used), to = read(source.offset + c, used);
        const vec<T> middle = read(mean + c, used);
        vec<T> a = {}, b = {};
        for (int t = 0; t < m; t++) {
            T* at = this->data + (i + t) * this->ld + c;
            const vec<T> value = read(source.x + (i + t) * source.ld + c, used);
            const vec<T> d = value * by + to <= 0 ? vec<T>{} : read<T>(at, used);
            put<T>(at, d, used);
            a += d;
            b += d * (value - middle);
        }
        for (int lane = 0; lane < lanes<T>; lane++) errors[c + lane] += a[lane];
        for (int lane = 0; lane < lanes<T>; lane++) products[c + lane] += b[lane];
    }
};

// Blocks of k of about the same length: a short last one would read C again for little.
template <class T> i64 even_block(i64 k) {
    const i64 limit = kc_of<T>() * 4 / 3, parts = (k + limit - 1) / limit;
    return (k + parts - 1) / parts;
}

// A block of rows at a time; make_rows and make_c give a thread its own plug-ins.
template <class T, class MakeRows, class MakeC>
void multiply_rows(i64 m, i64 n, i64 k, i64 threads, i64 mc, const Filters<T>& filters,
                   MakeRows make_rows, MakeC make_c, Scratch& scratch) {
    const i64 kc = even_block<T>(k);
    const Tile tile = choose_tile<T>(m, n, 8);
    const i64 nr = tile.nv * lanes<T>, padded = round_up(n, nr);
    T* packed = scratch.take<T>(padded * k);
    const T** tables = scratch.take<const T*>(threads * mc);
    if (scratch.measuring()) return;
    pack_whole(filters, n, k, kc, nr, packed, (int)threads);
    parallel((int)threads, [&](int index, int total) {
        const Range mine = part(m, tile.mr, index, total);
        auto rows = make_rows(index);
        RowsA<T, decltype(rows)> a{rows, tables + index * mc};
        WholeB<T> b{packed, padded, nr};
        auto c = make_c(index);
        for (i64 i = mine.begin; i < mine.end; i += mc)
            gemm<T>({i, std::min(i + mc, mine.end)}, {0, n}, k, kc, mc, n, tile, a, b, c);
    });
}

constexpr i64 norm_rows = blocks.mc / 2 / 8 * 8;  // at a time: with kc channels, a part of the cache

template <class T>
void norm_conv_forward(const Problem& g, const Normalised<T>& source, const T* w, const T* bias,
                       T* y, Scratch& scratch) {
    const i64 stride = round_up(even_block<T>(g.c), lanes<T>) + lanes<T>;
    T* buffers = scratch.take<T>(g.threads * norm_rows * stride);
    auto rows = [&](int index) {
        return NormalisedRows<T>{source, buffers + index * norm_rows * stride, stride};
    };
    auto c = [&](int) { return MatrixC<T>{y, g.f, {nullptr, bias, false}}; };
    multiply_rows<T>(g.columns(), g.f, g.c, g.threads, norm_rows, Filters<T>::forward(g, w), rows,
                     c, scratch);
}

// The norm's errors go to dx, where its gradients are then computed.
template <class T>
void norm_conv_backward(const Problem& g, const T* dy, const Normalised<T>& source,
                        const Norm<T>& norm, const T* w, T* dx, T* dweight, T* dbias,
                        Scratch& scratch) {
    const i64 padded = round_up(g.c, lanes<T>);
    double* sums = scratch.take<double>(g.threads * 2 * padded);
    if (!scratch.measuring()) fill_zero(sums, g.threads * 2 * padded);
    auto rows = [&](int) { return Strided<T>{dy, g.f, 1}; };
    auto c = [&](int index) {
        double* mine = sums + index * 2 * padded;
        return ErrorsC<T>{{dx, g.c}, source, norm.mean, mine, mine + padded};
    };
    multiply_rows<T>(g.columns(), g.c, g.f, g.threads, norm_rows, Filters<T>::backward(g, w), rows,
                     c, scratch);
    if (scratch.measuring()) return;
    std::vector<double> totals((std::size_t)(2 * g.c));
    for (i64 t = 0; t < g.threads; t++)
        for (i64 i = 0; i < 2 * g.c; i++) totals[i] += sums[(2 * t + i % 2) * padded + i / 2];
    const Images images = images_of(g);
    const Errors<T> errors{images, dx, source.scale, source.offset, false};
    norm_gradients(images, errors, source.x, norm, totals, dx, dweight, dbias);
}

}  // namespace shardwise
