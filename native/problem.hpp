// One convolution of volumes: x_NCDHW, w_FCTRS (C of one group), y_NFOPQ; `last` means the channels
// lie last. Images are volumes of one slice, lines are images of one row.
#pragma once

#include <vector>

#include "simd.hpp"

namespace shardwise {

struct Strides {
    i64 image, channel, slice, row, column;
};

struct Problem {
    i64 n, c, d, h, w, f, t, r, s, o, p, q;
    i64 stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
    i64 groups;
    i64 last;         // x and y: 0 NCHW, 1 channels last
    i64 filter_last;  // w: the same, by itself
    i64 relu;         // y = max(y, 0), forward only
    i64 threads;

    i64 group_c() const { return c / groups; }
    i64 group_f() const { return f / groups; }
    i64 taps() const { return t * r * s; }
    i64 terms() const { return group_c() * taps(); }  // rows of the im2col matrix
    i64 inputs() const { return d * h * w; }          // of one channel
    i64 pixels() const { return o * p * q; }          // outputs of one filter
    i64 columns() const { return n * pixels(); }      // columns of the im2col matrix
    bool flat() const { return d == 1 && t == 1 && o == 1 && pad_d == 0; }
    bool unit_stride() const { return stride_d == 1 && stride_h == 1 && stride_w == 1; }
    bool pointwise() const {
        return taps() == 1 && unit_stride() && pad_d == 0 && pad_h == 0 && pad_w == 0;
    }

    Strides x() const { return dense(c, d, h, w, last); }
    Strides y() const { return dense(f, o, p, q, last); }
    Strides filter() const { return dense(group_c(), t, r, s, filter_last); }

    static Strides dense(i64 channels, i64 slices, i64 rows, i64 columns, i64 last) {
        const i64 plane = rows * columns, image = channels * slices * plane;
        if (last) return {image, 1, plane * channels, columns * channels, channels};
        return {image, slices * plane, plane, columns, 1};
    }
};

// An output of one filter.
struct Pixel {
    i64 image, slice, row, column;
};

inline Pixel pixel_at(const Problem& g, i64 index) {
    const i64 in_image = index % g.pixels(), line = in_image / g.q;
    return {index / g.pixels(), line / g.p, line % g.p, in_image % g.q};
}

inline void next_line(const Problem& g, Pixel& at) {
    at.column = 0;
    if (++at.row < g.p) return;
    at.row = 0;
    if (++at.slice == g.o) at.slice = 0, at.image++;
}

inline void next_pixel(const Problem& g, Pixel& at) {  // a division costs as much as 40 products
    if (++at.column == g.q) next_line(g, at);
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

// What two spans share; where they share nothing, an empty part of the second.
inline Span both(Span a, Span b) {
    const i64 begin = a.begin < b.begin ? b.begin : a.begin < b.end ? a.begin : b.end;
    const i64 end = a.end < b.end ? a.end : b.end;
    return {begin, end < begin ? begin : end};
}

// Where the window of an output begins, in the input.
inline Pixel corner_of(const Problem& g, const Pixel& at) {
    return {at.image, at.slice * g.stride_d, at.row * g.stride_h, at.column * g.stride_w};
}

// How far from there a tap reads, and the outputs of a line for which that is inside of the line.
struct Shift {
    i64 deep, down, right;
    Span columns;
};

inline Shift shift_of(const Problem& g, i64 tap) {  // tap = (t, r, s)
    const i64 right = tap % g.s * g.dilation_w - g.pad_w;
    return {tap / (g.r * g.s) * g.dilation_d - g.pad_d, tap / g.s % g.r * g.dilation_h - g.pad_h,
            right, inside(0, g.q, g.stride_w, right, g.w)};
}

inline std::vector<Shift> shifts_of(const Problem& g) {  // finding one takes many divisions
    std::vector<Shift> shifts;
    for (i64 tap = 0; tap < g.taps(); tap++) shifts.push_back(shift_of(g, tap));
    return shifts;
}

inline bool within(i64 at, i64 size) { return (std::uint64_t)at < (std::uint64_t)size; }

// The line of an image, of d * h, that a tap of this window reads; -1 where it is padding.
inline i64 line_of(const Problem& g, const Pixel& corner, const Shift& tap) {
    const i64 slice = corner.slice + tap.deep, row = corner.row + tap.down;
    return within(slice, g.d) && within(row, g.h) ? slice * g.h + row : -1;
}

// The same for one element, of d * h * w.
inline i64 input_of(const Problem& g, const Pixel& corner, const Shift& tap) {
    const i64 line = line_of(g, corner, tap), column = corner.column + tap.right;
    return line >= 0 && within(column, g.w) ? line * g.w + column : -1;
}

// The convolution that computes dx of a convolution of stride 1: dy in, filters flipped, dx out.
inline Problem flipped(const Problem& g) {
    Problem t = g;
    t.c = g.f, t.d = g.o, t.h = g.p, t.w = g.q;
    t.f = g.c, t.o = g.d, t.p = g.h, t.q = g.w;
    t.pad_d = g.dilation_d * (g.t - 1) - g.pad_d;
    t.pad_h = g.dilation_h * (g.r - 1) - g.pad_h;
    t.pad_w = g.dilation_w * (g.s - 1) - g.pad_w;
    t.relu = 0;
    return t;
}

}  // namespace shardwise
