// Direct kernels for images of few channels (the first layer): a zero-padded planar copy of a band
// of rows is all that is built; the micro-kernels read every tap of the filter from it in place.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

constexpr i64 direct_channels = 4;

// Columns that a stride of w skips between are kept apart, so that the pixels of a row are
// contiguous: band[c][row][column % stride_w][column / stride_w], from the padding's corner.
template <class T> struct Band {
    const Problem& g;
    i64 width, most, rows;  // of one phase of columns; output rows of a band; rows of a full band

    explicit Band(const Problem& g) : g(g) {
        const i64 reach = g.dilation_w * (g.s - 1) / g.stride_w + 1;
        width = g.q + reach + lanes<T> * max_nv;  // tiles read whole vectors
        const i64 row_bytes = g.c * g.stride_w * width * (i64)sizeof(T);
        const i64 fit = tilings.direct_band_bytes / row_bytes - g.dilation_h * (g.r - 1);
        most = std::min(g.p, std::max<i64>(1, fit / g.stride_h));
        rows = rows_of(most);
    }
    i64 rows_of(i64 outputs) const {
        return (outputs - 1) * g.stride_h + g.dilation_h * (g.r - 1) + 1;
    }
    i64 elements() const { return g.c * rows * g.stride_w * width; }
    i64 tap(i64 i) const {  // i = (c, r, s)
        const i64 c = i / g.taps(), r = i % g.taps() / g.s, shift = i % g.s * g.dilation_w;
        return ((c * rows + r * g.dilation_h) * g.stride_w + shift % g.stride_w) * width +
               shift / g.stride_w;
    }
    i64 row(i64 p) const { return p * g.stride_h * g.stride_w * width; }

    void fill(const T* x, i64 image, i64 first, i64 outputs, T* band) const {
        const Strides from = g.x();
        const i64 count = rows_of(outputs);
        for (i64 c = 0; c < g.c; c++)
            for (i64 i = 0; i < count; i++) {
                const i64 line = first * g.stride_h - g.pad_h + i;
                T* to = band + (c * rows + i) * g.stride_w * width;
                fill_zero(to, g.stride_w * width);
                if (line < 0 || line >= g.h) continue;
                const T* source = x + image * from.image + c * from.channel + line * from.row;
                for (i64 phase = 0; phase < g.stride_w; phase++) {
                    const i64 shift = phase - g.pad_w;
                    const Span ok = inside(0, width, g.stride_w, shift, g.w);
                    copy_strided(to + phase * width + ok.begin,
                                 source + (ok.begin * g.stride_w + shift) * from.column,
                                 ok.end - ok.begin, g.stride_w * from.column);
                }
            }
    }
    // Calls work(image, first, outputs) for every band of these images, filled.
    template <class Work> void each(const T* x, Range images, T* band, Work work) const {
        for (i64 image = images.begin; image < images.end; image++)
            for (i64 p = 0; p < g.p; p += most) {
                const i64 outputs = std::min(most, g.p - p);
                fill(x, image, p, outputs, band);
                work(image, p, outputs);
            }
    }
};

template <class T> void direct_forward(const Problem& g, Tensors<T> t, Scratch& scratch) {
    constexpr int L = lanes<T>;
    const Band<T> bands(g);
    const i64 k = g.terms();
    const bool last = g.last != 0;
    const Tile tile = last ? choose_tile<T>(g.q, g.f) : choose_tile<T>(g.f, g.q);
    const i64 nr = tile.nv * L, width = last ? nr : tile.mr;
    T* packed = scratch.take<T>(round_up(g.f, width) * k);
    T* buffers = scratch.take<T>(g.threads * bands.elements());
    i64* band_at = scratch.take<i64>(k);
    i64* packed_at = scratch.take<i64>(k);
    if (scratch.measuring()) return;
    Filters<T> filters = Filters<T>::forward(g, t.w);
    filters.taps_first = false;  // k = (c, r, s) in both layouts
    pack_whole(filters, g.f, k, k, width, packed, (int)g.threads);
    for (i64 i = 0; i < k; i++) band_at[i] = bands.tap(i), packed_at[i] = i * width;
    parallel((int)g.threads, [&](int index, int total) {
        T* band = buffers + index * bands.elements();
        alignas(64) T buffer[max_tile * L];
        bands.each(t.x, part(g.n, 1, index, total), band, [&](i64 image, i64 first, i64 outputs) {
            for (i64 p = 0; p < outputs; p++) {
                const T* row = band + bands.row(p);
                const i64 at = (image * g.p * (last ? 1 : g.f) + first + p) * g.q;
                const T* bias = t.bias;
                const MatrixC<T> c =
                    last ? MatrixC<T>{t.out + at * g.f, g.f, {nullptr, bias, g.relu != 0}}
                         : MatrixC<T>{t.out + at, g.pixels(), {bias, nullptr, g.relu != 0}};
                const i64 rows = last ? g.q : g.f, columns = last ? g.f : g.q;
                for (i64 j = 0; j < columns; j += nr)
                    for (i64 i = 0; i < rows; i += tile.mr) {
                        const int m = (int)std::min<i64>(tile.mr, rows - i);
                        const int n = (int)std::min(nr, columns - j), nv = (n + L - 1) / L;
                        const bool whole = n == nv * L;
                        const Target<T> to{whole ? c.data + i * c.ld + j : buffer,
                                           whole ? c.ld : nr, false};
                        const auto multiply = micro<T>(m, nv).offset;
                        if (last) multiply(k, row + i, band_at, packed + j * k, packed_at, to);
                        else multiply(k, packed + i * k, packed_at, row + j, band_at, to);
                        if (!whole) c.add(i, j, m, n, buffer, nr, false);
                        c.finish(i, j, m, n);
                    }
            }
        });
    });
}

// dw^T[(c, r, s), f] += band[(c, r, s), pixel] dy[pixel, f]: rows of taps are pointers into the
// band.
template <class T> struct BandRows {
    const Band<T>& bands;
    const T* band;

    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        const i64 q = bands.g.q;  // k is cut at whole output rows
        segments = kb / q, length = q;
        for (i64 segment = 0; segment < segments; segment++)
            for (i64 t = 0; t < mb; t++)
                table[segment * mb + t] = band + bands.row(k / q + segment) + bands.tap(i + t);
    }
};

template <class T> void direct_filter(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const Band<T> bands(g);
    const i64 m = g.terms(), q = g.q;
    const Tile tile = choose_tile<T>(m, g.f, 8);
    const i64 nr = tile.nv * lanes<T>, ld = round_up(g.f, nr);
    const i64 kc = std::min(bands.most * q, block_of(q, kc_of<T>() * 2));
    T* sums = scratch.take<T>(g.threads * m * ld);
    T* buffers = scratch.take<T>(g.threads * bands.elements());
    T* panels = scratch.take<T>(g.threads * ld * kc);
    const i64 table = m * (kc / q);
    const T** tables = scratch.take<const T*>(g.threads * table);
    if (scratch.measuring()) return;
    zero(g, g.threads * m * ld, sums);
    parallel((int)g.threads, [&](int index, int total) {
        T* band = buffers + index * bands.elements();
        MatrixC<T> c{sums + index * m * ld, ld, {}, true};
        bands.each(t.x, part(g.n, 1, index, total), band, [&](i64 image, i64 first, i64 outputs) {
            BandRows<T> rows{bands, band};
            RowsA<T, BandRows<T>> a{rows, tables + index * table};
            const i64 k = outputs * q;
            const i64 at = image * g.f * g.pixels() + first * q * (g.last ? g.f : 1);
            const Strided<T> errors = g.last ? Strided<T>{t.y + at, 1, g.f}
                                             : Strided<T>{t.y + at, g.pixels(), 1};
            PackedB<T, Strided<T>> b{errors, nr, panels + index * ld * kc};
            gemm<T>({0, m}, {0, g.f}, k, kc, m, ld, tile, a, b, c);
        });
    });
    for (i64 i = 1; i < g.threads; i++) add(sums, sums + i * m * ld, m * ld);
    store_filter(g, sums, ld, t.out);
}

inline bool direct_takes(const Problem& g, int) {
    return g.flat() && g.groups == 1 && g.c <= direct_channels;
}

}  // namespace shardwise
