// What the loop nest packs: element (i, k) of a matrix that need not exist.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.hpp"
#include "problem.hpp"

namespace shardwise {

template <class T> inline void pad_rows(T* to, i64 count, i64 width, i64 kb) {
    if (count < width)
        for (i64 k = 0; k < kb; k++) fill_zero(to + k * width + count, width - count);
}

template <class T> struct Strided {
    const T* data;
    i64 by_i, by_k;

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        const T* from = data + i * by_i + k * by_k;
        if (by_k == 1) return transpose_block(from, by_i, count, kb, to, width, width);
        for (i64 p = 0; p < kb; p++) copy_strided(to + p * width, from + p * by_k, count, by_i);
        pad_rows(to, count, width, kb);
    }
    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        segments = 1, length = kb;
        for (i64 t = 0; t < mb; t++) table[t] = data + (i + t) * by_i + k;
    }
};

// A matrix whose rows are k, as channels-last tensors are: data[k * ld + i].
template <class T> struct RowsOfK {
    const T* data;
    i64 ld;

    void pack_all(i64 i, i64 total, i64 k, i64 kb, i64 width, T* to) const {
        for (i64 p = 0; p < kb; p++) {
            const T* from = data + (k + p) * ld + i;
            for (i64 j = 0; j < total; j += width) {
                const i64 count = std::min(width, total - j);
                copy(to + j * kb + p * width, from + j, count);
                if (count < width) fill_zero(to + j * kb + p * width + count, width - count);
            }
        }
    }
};

// Filters of one group: i counts one channel dimension, k the other and the taps.
template <class T> struct Filters {
    const T* data;
    i64 by_i, by_o, by_tap;  // elements between i, the other channel dimension, and taps
    i64 others, taps;
    bool taps_first;         // k = (tap, other) as channels last has it; else (other, tap)

    // w[f, c, tap]: i = f, k over c
    static Filters forward(const Problem& g, const T* w) {
        const Strides d = g.filter();
        return {w, d.image, d.channel, d.column, g.group_c(), g.taps(), g.last != 0};
    }
    // i = c, k over f, taps from the last to the first
    static Filters backward(const Problem& g, const T* w) {
        const Strides d = g.filter();
        const T* end = w + (g.taps() - 1) * d.column;
        return {end, d.channel, d.image, -d.column, g.group_f(), g.taps(), g.last != 0};
    }

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        const i64 outer = taps_first ? by_tap : by_o, inner = taps_first ? by_o : by_tap;
        const i64 length = taps_first ? others : taps;  // of the inner dimension of k
        if (length == 1 || taps * others == length || outer == length * inner) {
            const i64 by_k = length == 1 ? outer : inner;
            return Strided<T>{data, by_i, by_k}.pack(i, count, k, kb, width, to);
        }
        const T* from = data + i * by_i + k / length * outer;
        i64 at = k % length;
        for (i64 p = 0; p < kb; p++) {
            copy_strided(to + p * width, from + at * inner, count, by_i);
            if (++at == length) at = 0, from += outer;
        }
        pad_rows(to, count, width, kb);
    }
};

// i = (c, t, r, s) or (t, r, s, c), k = f: the filters as DECONVGEMM reads them.
template <class T> struct FilterColumns {
    const T* data;
    Strides d;
    i64 channels, taps;
    bool taps_first;

    FilterColumns(const Problem& g, const T* w)
        : data(w), d(g.filter()), channels(g.group_c()), taps(g.taps()),
          taps_first(g.last != 0) {}

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        const bool same = taps_first ? d.channel == 1 : d.column == 1;  // as the filters lie
        if (same || taps == 1)
            return Strided<T>{data, 1, d.image}.pack(i, count, k, kb, width, to);
        for (i64 t = 0; t < count; t++) {
            const i64 at = i + t, tap = taps_first ? at / channels : at % taps;
            const i64 channel = taps_first ? at % channels : at / taps;
            const T* from = data + channel * d.channel + tap * d.column + k * d.image;
            for (i64 p = 0; p < kb; p++) to[p * width + t] = from[p * d.image];
        }
        pad_rows(to, count, width, kb);
    }
};

// Planar images: i = pixel of the batch, k = channel.
template <class T> struct ImagePixels {
    const T* data;
    i64 image, pixels;

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        for (i64 t = 0; t < count;) {
            const i64 length = std::min(count - t, pixels - (i + t) % pixels);
            const T* from = data + (i + t) / pixels * image + k * pixels + (i + t) % pixels;
            for (i64 p = 0; p < kb; p++) copy(to + p * width + t, from + p * pixels, length);
            t += length;
        }
        pad_rows(to, count, width, kb);
    }
};

// im2col of planar images: i = output pixel of the batch, k = (c, t, r, s) (P1, Fig. 6).
template <class T> struct Patches {
    const Problem& g;
    const T* x;  // at the group's first channel
    std::vector<Shift> shifts;

    struct Run {
        i64 from, to, count;
    };

    Patches(const Problem& g, const T* x) : g(g), x(x), shifts(shifts_of(g)) {}

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        if (g.pointwise())
            return ImagePixels<T>{x, g.c * g.inputs(), g.inputs()}.pack(i, count, k, kb, width, to);
        const i64 taps = g.taps(), plane = g.inputs();
        const Pixel first_pixel = pixel_at(g, i);
        Run runs[max_nv * lanes<T> + 1];
        for (i64 tap = 0; tap < std::min(taps, kb + taps); tap++) {
            const i64 first = k > tap ? (k - tap + taps - 1) / taps : 0;
            if (first * taps + tap >= k + kb) continue;
            i64 covered = 0;
            const int num_runs = find_runs(first_pixel, count, shifts[tap], runs, covered);
            for (i64 c = first; c * taps + tap < k + kb; c++) {
                T* row = to + (c * taps + tap - k) * width;
                const T* from = x + c * plane;
                if (covered < width) fill_zero(row, width);
                for (int t = 0; t < num_runs; t++)
                    copy_strided(row + runs[t].to, from + runs[t].from, runs[t].count, g.stride_w);
            }
        }
    }

    // The parts of this panel that one tap finds inside the images.
    int find_runs(Pixel at, i64 count, const Shift& tap, Run* runs, i64& covered) const {
        int num_runs = 0;
        for (i64 t = 0; t < count;) {
            const i64 length = std::min(count - t, g.q - at.column);
            const i64 line = line_of(g, corner_of(g, at), tap);
            const Span ok = both(tap.columns, {at.column, at.column + length});
            if (line >= 0 && ok.begin < ok.end) {
                const i64 from = (at.image * g.c * g.d * g.h + line) * g.w +
                                 ok.begin * g.stride_w + tap.right;
                runs[num_runs++] = {from, t + ok.begin - at.column, ok.end - ok.begin};
                covered += ok.end - ok.begin;
            }
            t += length;
            next_line(g, at);
        }
        return num_runs;
    }

};

// im2col of channels-last images, never packed: each tap of a pixel is a pointer into x.
template <class T> struct PatchRows {
    const Problem& g;
    const T* x;      // at the group's first channel
    const T* zeros;  // group_c of them: what padding reads

    // k begins and ends at a tap, or lies inside one.
    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        const i64 channels = g.group_c(), first = k / channels, c = k % channels;
        length = std::min(kb, channels), segments = kb / length;
        for (i64 segment = 0; segment < segments; segment++) {
            const Shift tap = shift_of(g, first + segment);
            const T** to = table + segment * mb;
            Pixel at = pixel_at(g, i);
            for (i64 t = 0; t < mb; next_line(g, at)) {
                const Pixel corner = corner_of(g, at);
                const i64 line = line_of(g, corner, tap), end = std::min(mb, t + g.q - at.column);
                const i64 width = line >= 0 ? g.w : 0;  // no column is in a line that is padding
                const T* from = x + (at.image * g.inputs() + line * g.w) * g.c + c;
                i64 column = corner.column + tap.right;
                for (; t < end; t++, column += g.stride_w)
                    to[t] = within(column, width) ? from + column * g.c : zeros;
            }
        }
    }
};

// Part of a row of im2col of planar images: a tap of a channel at kb pixels of the batch.
template <class T>
void patch_row(const Problem& g, const T* x, i64 c, const Shift& tap, Pixel at, i64 kb, T* to) {
    for (i64 t = 0; t < kb; next_line(g, at)) {
        const i64 length = std::min(kb - t, g.q - at.column);
        const i64 line = line_of(g, corner_of(g, at), tap);
        Span ok = both(tap.columns, {at.column, at.column + length});
        if (line < 0) ok = {at.column, at.column};
        const i64 before = ok.begin - at.column, count = ok.end - ok.begin;
        fill_zero(to + t, before);
        copy_strided(to + t + before,
                     x + ((at.image * g.c + c) * g.d * g.h + line) * g.w +
                         ok.begin * g.stride_w + tap.right,
                     count, g.stride_w);
        fill_zero(to + t + before + count, length - before - count);
        t += length;
    }
}

// im2col transposed, planar (P1, Fig. 10): rows are copied, not transposed; k = pixels.
template <class T> struct TapRows {
    const Problem& g;
    const T* x;
    T* buffer;  // mc rows of `stride`
    i64 stride;
    std::vector<Shift> shifts = shifts_of(g);

    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        segments = 1, length = kb;
        const Pixel at = pixel_at(g, k);
        for (i64 t = 0; t < mb; t++) {
            const i64 c = (i + t) / g.taps(), tap = (i + t) % g.taps();
            patch_row(g, x, c, shifts[tap], at, kb, buffer + t * stride);
            table[t] = buffer + t * stride;
        }
    }
};

// im2col transposed, channels last: i = (t, r, s, c), k = pixels; vectors of channels are copied.
template <class T> struct TapColumns {
    const Problem& g;
    const T* x;

    // Channels of one tap that lie in one panel.
    struct Piece {
        Shift tap;
        i64 channel, count, to;
    };

    void pack_all(i64 i, i64 total, i64 k, i64 kb, i64 width, T* to) const {
        const std::vector<Piece> pieces = cut(i, total, kb, width);
        Pixel at = pixel_at(g, k);
        for (i64 p = 0; p < kb; p++, next_pixel(g, at)) {
            const T* image = x + at.image * g.inputs() * g.c;
            const Pixel corner = corner_of(g, at);
            for (const Piece& one : pieces) {
                const i64 in = input_of(g, corner, one.tap);
                T* target = to + one.to + p * width;
                if (one.channel >= 0 && in >= 0)
                    copy(target, image + in * g.c + one.channel, one.count);
                else fill_zero(target, one.count);
            }
        }
    }

    std::vector<Piece> cut(i64 i, i64 total, i64 kb, i64 width) const {
        std::vector<Piece> pieces;
        const i64 channels = g.group_c();
        for (i64 t = 0; t < total;) {
            const i64 tap = (i + t) / channels, c = (i + t) % channels, inside = t % width;
            const i64 count = std::min({total - t, channels - c, width - inside});
            pieces.push_back({shift_of(g, tap), c, count, (t - inside) * kb + inside});
            t += count;
        }
        if (const i64 used = total % width)  // zeros to the end of the last panel
            pieces.push_back({{}, -1, width - used, total / width * width * kb + used});
        return pieces;
    }
};

// Planar images with pixels as k: i = channel.
template <class T> struct ImageColumns {
    const T* data;
    i64 image, pixels;

    void pack(i64 i, i64 count, i64 k, i64 kb, i64 width, T* to) const {
        for (i64 t = 0; t < kb;) {
            const i64 length = std::min(kb - t, pixels - (k + t) % pixels);
            const T* from = data + (k + t) / pixels * image + i * pixels + (k + t) % pixels;
            transpose_block(from, pixels, count, length, to + t * width, width, width);
            t += length;
        }
    }
};

}  // namespace shardwise
