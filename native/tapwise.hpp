// dw a tap at a time: dw[tap][c, f] = sum over outputs of x[output + tap][c] dy[output][f].
//
// Nothing of x is copied: CONVGEMM_TRANS copies an element of im2col for as few multiply-adds as
// there are filters (16 channels of 48^3 voxels, AVX-512: 113 Gflop/s; this: 196). What is padding
// is skipped instead of multiplied: at 8^3 voxels that is 23 % of the work.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// The lines of x that a tap reads for kb outputs from `at` on, beside the packed errors.
inline i64 stretches_of(const Problem& g, const Strides& x, Pixel at, i64 kb, const Shift& tap,
                     Stretch* stretches) {
    i64 count = 0;
    for (i64 t = 0; t < kb; next_line(g, at)) {
        const i64 length = std::min(kb - t, g.q - at.column);
        const i64 line = line_of(g, corner_of(g, at), tap);
        const Span ok = both(tap.columns, {at.column, at.column + length});
        if (line >= 0 && ok.begin < ok.end)
            stretches[count++] = {at.image * x.image + line * x.row +
                                   (ok.begin * g.stride_w + tap.right) * x.column,
                               t + ok.begin - at.column, ok.end - ok.begin};
        t += length;
    }
    return count;
}

// From [(tap, c)][ld of f] to dw of one group.
template <class T> void store_taps(const Problem& g, const T* sums, i64 ld, T* dw) {
    const i64 channels = g.group_c(), terms = g.terms(), filters = g.group_f();
    if (g.filter_last) return transpose_block(sums, ld, terms, filters, dw, terms, terms);
    for (i64 c = 0; c < channels; c++)
        transpose_block(sums + c * ld, channels * ld, g.taps(), filters, dw + c * g.taps(), terms,
                        g.taps());
}

// Threads own taps, or panels of channels of one: no sum is shared.
template <class T, class Errors>
void tapwise_group(const Problem& g, const T* x, const Errors& errors, T* dw, Scratch& scratch) {
    constexpr int L = lanes<T>;
    const Strides by = g.x();
    const i64 m = g.group_c(), n = g.group_f(), k = g.columns(), kc = kc_of<T>();
    const Tile tile = choose_tile<T>(m, n, g.last ? max_mr : 8);
    const i64 nr = tile.nv * L, ld = round_up(n, nr), panels = round_up(m, tile.mr) / tile.mr;
    T* sums = scratch.take<T>(g.terms() * ld);
    T* packed = scratch.take<T>(g.threads * ld * kc);
    Stretch* lines = scratch.take<Stretch>(g.threads * kc);
    if (scratch.measuring()) return;
    zero(g, g.terms() * ld, sums);
    const std::vector<Shift> shifts = shifts_of(g);
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.taps() * panels, 1, index, total);
        PackedB<T, Errors> b{errors, nr, packed + index * ld * kc};
        Stretch* stretches = lines + index * kc;
        for (i64 pc = 0; pc < k && mine.size() > 0; pc += kc) {
            const i64 kb = std::min(kc, k - pc);
            const Pixel first = pixel_at(g, pc);
            b.load(0, n, pc, kb);
            for (i64 unit = mine.begin, end; unit < mine.end; unit = end) {
                const i64 tap = unit / panels;
                end = std::min(mine.end, (tap + 1) * panels);
                const i64 count = stretches_of(g, by, first, kb, shifts[tap], stretches);
                const i64 from = (unit - tap * panels) * tile.mr;
                const i64 to = std::min(m, (end - tap * panels) * tile.mr);
                for (i64 j = 0; j < n; j += nr)
                    for (i64 i = from; i < to; i += tile.mr) {
                        const int rows = (int)std::min<i64>(tile.mr, m - i);
                        const int nv = (int)((std::min(nr, n - j) + L - 1) / L);
                        const Target<T> c{sums + (tap * m + i) * ld + j, ld, true};
                        micro<T>(rows, nv).stretches(count, stretches, x + i * by.channel,
                                                     by.channel, by.column * g.stride_w,
                                                     b.panel(j), nr, c);
                    }
            }
        }
    });
    store_taps(g, sums, ld, dw);
}

template <class T> void tapwise(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const Strides x = g.x(), y = g.y();
    const Scratch start = scratch;
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* dw = t.out + group * g.group_f() * g.terms();
        const T* mine = t.x + group * g.group_c() * x.channel;
        const T* dy = t.y + group * g.group_f() * y.channel;
        if (g.last) tapwise_group(g, mine, RowsOfK<T>{dy, g.f}, dw, scratch);
        else tapwise_group(g, mine, ImageColumns<T>{dy, y.image, g.pixels()}, dw, scratch);
    }
}

}  // namespace shardwise
