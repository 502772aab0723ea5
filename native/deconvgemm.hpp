// P1's DECONVGEMM: dx a panel of the im2col matrix at a time.
#pragma once

#include "im2col.hpp"

namespace shardwise {

// dx = col2im(w^T dy), a panel of pixels of one image at a time (P1, Fig. 7). A thread adds only to
// its own images, or to its own channels of an image: the unpacking needs no lock.
template <class T>
void deconvgemm_planar(const Problem& g, Tensors<T> t, i64 panel_bytes, Scratch& scratch) {
    const i64 m = g.terms(), k = g.group_f(), kc = kc_of<T>(), plane = g.inputs();
    const Tile tile = choose_tile<T>(m, g.pixels());
    const i64 nr = tile.nv * lanes<T>, padded = round_up(m, tile.mr);
    const i64 most = std::max<i64>(panel_bytes / (m * (i64)sizeof(T)), 2 * nr) / nr * nr;
    const i64 nc = std::min(round_up(g.pixels(), nr), most);
    T* packed = scratch.take<T>(padded * k);
    T* panels = scratch.take<T>(g.threads * m * nc);
    T* buffers = scratch.take<T>(g.threads * nc * kc);
    if (scratch.measuring()) return;
    const i64 cuts = std::min(g.group_c(), std::max<i64>(1, g.threads / std::max<i64>(g.n, 1)));
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * m);
        pack_whole(filters, m, k, kc, tile.mr, packed, (int)g.threads);
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(g.n * cuts, 1, index, total);
            for (i64 job = mine.begin; job < mine.end; job++) {
                const i64 image = job / cuts;
                const Range channels = part(g.group_c(), tile.mr, job % cuts, cuts);
                T* dx = t.out + (image * g.c + group * g.group_c() + channels.begin) * plane;
                const T* dy = t.y + (image * g.f + group * k) * g.pixels();
                fill_zero(dx, channels.size() * plane);
                for (i64 at = 0; at < g.pixels(); at += nc) {
                    const i64 count = std::min(nc, g.pixels() - at);
                    const Strided<T> errors{dy + at, 1, g.pixels()};
                    WholeA<T> a{packed, padded, tile.mr};
                    PackedB<T, Strided<T>> b{errors, nr, buffers + index * nc * kc};
                    T* panel = panels + index * m * nc;
                    MatrixC<T> c{panel, nc};
                    gemm<T>({channels.begin * g.taps(), channels.end * g.taps()}, {0, count}, k, kc,
                            m, nc, tile, a, b, c);
                    col2im_planar(g, panel + channels.begin * g.taps() * nc, nc, at, at + count,
                                  channels.size(), dx);
                }
            }
        });
    }
}

template <class T>
void deconvgemm_last(const Problem& g, Tensors<T> t, i64 panel_bytes, Scratch& scratch) {
    const i64 n = g.terms(), k = g.group_f(), kc = kc_of<T>();
    const i64 most = std::max<i64>(panel_bytes / (n * (i64)sizeof(T)), 48);
    const Tile tile = choose_tile<T>(most, n, 8);
    const i64 nr = tile.nv * lanes<T>, padded = round_up(n, nr);
    const i64 mc = std::min(g.pixels(), most / tile.mr * tile.mr);
    T* packed = scratch.take<T>(padded * k);
    T* panels = scratch.take<T>(g.threads * mc * n);
    const T** tables = scratch.take<const T*>(g.threads * mc);
    if (scratch.measuring()) return;
    zero(g, g.n * g.c * g.inputs(), t.out);
    for (i64 group = 0; group < g.groups; group++) {
        const FilterColumns<T> filters(g, t.w + group * k * n);
        pack_whole(filters, n, k, kc, nr, packed, (int)g.threads);
        parallel((int)g.threads, [&](int index, int total) {
            const Range mine = part(g.n, 1, index, total);
            for (i64 image = mine.begin; image < mine.end; image++) {
                const Strided<T> errors{t.y + image * g.f * g.pixels() + group * k, g.f, 1};
                T* dx = t.out + image * g.c * g.inputs() + group * g.group_c();
                T* panel = panels + index * mc * n;
                for (i64 at = 0; at < g.pixels(); at += mc) {
                    const i64 count = std::min(mc, g.pixels() - at);
                    RowsA<T, const Strided<T>> a{errors, tables + index * mc};
                    WholeB<T> b{packed, padded, nr};
                    MatrixC<T> c{panel - at * n, n};
                    gemm<T>({at, at + count}, {0, n}, k, kc, mc, n, tile, a, b, c);
                    col2im_last(g, panel, at, at + count, dx);
                }
            }
        });
    }
}

template <class T> void deconvgemm(const Problem& g, Tensors<T> t, Scratch& scratch) {
    const i64 panel_bytes = blocks.cache_bytes / 2;
    if (g.last) deconvgemm_last(g, t, panel_bytes, scratch);
    else deconvgemm_planar(g, t, panel_bytes, scratch);
}

}  // namespace shardwise
