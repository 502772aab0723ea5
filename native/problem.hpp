// One convolution. x_NCHW, w_FCRS (C of one group), y_NFPQ; `last` means the channels lie last.
#pragma once

#include "simd.hpp"

namespace shardwise {

struct Strides {
    i64 image, channel, row, column;
};

struct Problem {
    i64 n, c, h, w, f, r, s, p, q;
    i64 stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
    i64 last;         // x and y: 0 NCHW, 1 channels last
    i64 filter_last;  // w: the same, by itself
    i64 relu;         // y = max(y, 0), forward only
    i64 threads;

    i64 group_c() const { return c / groups; }
    i64 group_f() const { return f / groups; }
    i64 taps() const { return r * s; }
    i64 depth() const { return group_c() * r * s; }  // rows of the im2col matrix
    i64 pixels() const { return p * q; }
    i64 columns() const { return n * p * q; }        // columns of the im2col matrix
    bool unit_stride() const { return stride_h == 1 && stride_w == 1; }
    bool pointwise() const {
        return r == 1 && s == 1 && unit_stride() && pad_h == 0 && pad_w == 0;
    }

    Strides x() const { return dense(c, h, w, last); }
    Strides y() const { return dense(f, p, q, last); }
    Strides filter() const { return dense(group_c(), r, s, filter_last); }

    static Strides dense(i64 channels, i64 rows, i64 columns, i64 last) {
        const i64 image = channels * rows * columns;
        if (last) return {image, 1, columns * channels, channels};
        return {image, rows * columns, columns, 1};
    }
};

struct Pixel {
    i64 image, row, column;
};

inline Pixel pixel_at(const Problem& g, i64 index) {
    const i64 in_image = index % g.pixels();
    return {index / g.pixels(), in_image / g.q, in_image % g.q};
}

inline void next_pixel(const Problem& g, Pixel& at) {  // a division costs as much as 40 products
    if (++at.column < g.q) return;
    at.column = 0;
    if (++at.row == g.p) at.row = 0, at.image++;
}

struct Span {
    i64 begin, end;
};

// The outputs q in [begin, end) whose input q * stride + shift lies in [0, size).
inline Span inside(i64 begin, i64 end, i64 stride, i64 shift, i64 size) {
    const i64 first = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
    const i64 last = size - shift > 0 ? (size - shift - 1) / stride + 1 : 0;
    if (begin < first) begin = first;
    if (end > last) end = last;
    if (end < begin) end = begin;
    return {begin, end};
}

// The convolution that computes dx of a convolution of stride 1: dy in, filters flipped, dx out.
inline Problem flipped(const Problem& g) {
    Problem t = g;
    t.c = g.f, t.h = g.p, t.w = g.q;
    t.f = g.c, t.p = g.h, t.q = g.w;
    t.pad_h = g.dilation_h * (g.r - 1) - g.pad_h;
    t.pad_w = g.dilation_w * (g.s - 1) - g.pad_w;
    t.relu = 0;
    return t;
}

}  // namespace shardwise
