// P1's REINDEX: dw as a convolution of its own.
#pragma once

#include "convgemm.hpp"

namespace shardwise {

// dw as a CONVGEMM: x becomes x'[c, n, (r, p), (s, q)], whose convolution with dy as the filter and
// strides (p, q) is dw[f, c, r, s] (P1, Fig. 8 and 9).
template <class T> void reindex(const Problem& g, Tensors<T> t, Scratch& scratch) {
    Problem d = g;  // the convolution that computes dw of one group
    d.n = g.group_c(), d.c = g.n, d.h = g.r * g.p, d.w = g.s * g.q;
    d.f = g.group_f(), d.r = g.p, d.s = g.q, d.p = g.r, d.q = g.s;
    d.stride_h = g.p, d.stride_w = g.q, d.pad_h = d.pad_w = 0, d.dilation_h = d.dilation_w = 1;
    d.groups = 1, d.last = d.filter_last = d.relu = 0;
    T* x = scratch.take<T>(d.n * d.c * d.h * d.w);
    T* dy = scratch.take<T>(d.f * g.n * g.pixels());
    T* dw = scratch.take<T>(g.filter_last ? d.f * g.terms() : 0);
    const Scratch start = scratch;
    const Strides from = g.x(), errors = g.y();
    for (i64 group = 0; group < g.groups; group++) {
        scratch = start;
        T* out = t.out + group * g.group_f() * g.terms();
        if (x) {
            const T* source = t.x + group * g.group_c() * from.channel;
            parallel((int)g.threads, [&](int index, int total) {
                const Range mine = part(d.n * d.c * d.h, 1, index, total);
                for (i64 i = mine.begin; i < mine.end; i++) {
                    const i64 c = i / (d.c * d.h), n = i / d.h % d.c, r = i % d.h / g.p;
                    const i64 row = i % d.h % g.p * g.stride_h - g.pad_h + r * g.dilation_h;
                    T* to = x + i * d.w;
                    fill_zero(to, d.w);
                    if (row < 0 || row >= g.h) continue;
                    const T* line = source + n * from.image + c * from.channel + row * from.row;
                    for (i64 s = 0; s < g.s; s++) {
                        const i64 shift = s * g.dilation_w - g.pad_w;
                        const Span ok = inside(0, g.q, g.stride_w, shift, g.w);
                        copy_strided(to + s * g.q + ok.begin,
                                     line + (ok.begin * g.stride_w + shift) * from.column,
                                     ok.end - ok.begin, g.stride_w * from.column);
                    }
                }
                const Range rows = part(d.f * g.n, 1, index, total);
                for (i64 i = rows.begin; i < rows.end; i++)
                    copy_strided(dy + i * g.pixels(),
                                 t.y + i % g.n * errors.image +
                                     (group * d.f + i / g.n) * errors.channel,
                                 g.pixels(), errors.column);
            });
        }
        const Filters<T> filters{dy, d.terms(), g.pixels(), 1, d.c, d.taps(), false};
        const Patches<T> patches{d, x};
        const MatrixC<T> c{g.filter_last ? dw : out, g.terms()};
        multiply_planar(d, &filters, &patches, &c, 1, d.terms(), scratch);
        if (x && g.filter_last)
            for (i64 f = 0; f < d.f; f++)
                for (i64 i = 0; i < g.terms(); i++)
                    out[f * g.terms() + i % g.taps() * g.group_c() + i / g.taps()] =
                        dw[f * g.terms() + i];
    }
}

inline bool flat(const Problem& g, int) { return g.flat(); }

}  // namespace shardwise
