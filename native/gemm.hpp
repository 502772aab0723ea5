// The loop nest of BLIS, written once. What is multiplied and where the result goes are plug-ins:
//
// A: load(i, mb, k, kb) makes a block ready; multiply(i, mr, nv, b, ldb, to) runs a micro-kernel.
// B: load(j, nb, k, kb) makes a block ready; panel(j) is where nr columns of it lie, [kb][ld].
// C: sums(k) says whether to add to what is there; direct(i, j, n, ldc) is where a tile may be
//    written, or null; add(...) writes one from a buffer; finish(...) is called once for each tile,
//    when its sums are complete.
#pragma once

#include <algorithm>
#include <type_traits>

#include "blocks.hpp"
#include "threads.hpp"

namespace shardwise {

// C is read only after the k loop: by then it is there.
template <class T> inline void prefetch_tile(const T* c, i64 ldc, int m, int nv) {
    for (int i = 0; i < m; i++)
        for (int v = 0; v < nv; v++) __builtin_prefetch(c + i * ldc + v * lanes<T>, 1);
}

template <class T, class A, class B, class C>
void gemm(Range rows, Range columns, i64 k, i64 kc, i64 mc, i64 nc, Tile tile, A& a, B& b, C& c) {
    constexpr int L = lanes<T>;
    const i64 nr = tile.nv * L;
    alignas(64) T buffer[max_tile * L];
    for (i64 jc = columns.begin; jc < columns.end; jc += nc) {         // loop 5: columns of B
        const i64 nb = std::min(nc, columns.end - jc);
        for (i64 pc = 0; pc < k; pc += kc) {                           // loop 4: the sum
            const i64 kb = std::min(kc, k - pc);
            b.load(jc, nb, pc, kb);
            for (i64 ic = rows.begin; ic < rows.end; ic += mc) {       // loop 3: rows of A
                const i64 mb = std::min(mc, rows.end - ic);
                a.load(ic, mb, pc, kb);
                for (i64 jr = jc; jr < jc + nb; jr += nr) {            // loop 2: panels of B
                    const int n = (int)std::min(nr, jc + nb - jr), nv = (n + L - 1) / L;
                    for (i64 ir = ic; ir < ic + mb; ir += tile.mr) {   // loop 1: panels of A
                        const int m = (int)std::min<i64>(tile.mr, ic + mb - ir);
                        i64 ldc = nr;
                        T* out = n == nv * L ? c.direct(ir, jr, n, ldc) : nullptr;
                        if (out) {
                            if (c.sums(pc)) prefetch_tile(out, ldc, m, nv);
                            const Target<T> to{out, ldc, c.sums(pc)};
                            a.multiply(ir, m, nv, b.panel(jr), b.ld, to);
                        } else {
                            a.multiply(ir, m, nv, b.panel(jr), b.ld, Target<T>{buffer, nr, false});
                            c.add(ir, jr, m, n, buffer, nr, c.sums(pc));
                        }
                        if (pc + kb == k) c.finish(ir, jr, m, n);
                    }
                }
            }
        }
    }
}

// A source may pack all panels of a block in one pass, which reads memory in order.
template <class Source, class T, class = void> struct PacksAll {
    static void run(const Source& source, i64 i, i64 total, i64 k, i64 kb, i64 width, T* to) {
        for (i64 j = 0; j < total; j += width)
            source.pack(i + j, std::min(width, total - j), k, kb, width, to + j * kb);
    }
};
template <class Source, class T>
struct PacksAll<Source, T, std::void_t<decltype(&Source::pack_all)>> {
    static void run(const Source& source, i64 i, i64 total, i64 k, i64 kb, i64 width, T* to) {
        source.pack_all(i, total, k, kb, width, to);
    }
};

// -- A --------------------------------------------------------------------------------------------

// Packs each block when it is needed; a Source has pack(i, count, k, kb, width, to): to[k][width].
template <class T, class Source> struct PackedA {
    const Source& source;
    int mr;
    T* buffer;
    i64 start = 0, kb = 0;

    void load(i64 ic, i64 mb, i64 pc, i64 kb_) {
        start = ic, kb = kb_;
        PacksAll<Source, T>::run(source, ic, mb, pc, kb, mr, buffer);
    }
    void multiply(i64 i, int m, int nv, const T* b, i64 ldb, const Target<T>& to) const {
        micro<T>(m, nv).packed(kb, buffer + (i - start) * kb, mr, b, ldb, to);
    }
};

// Packed as a whole before, by pack_whole; all threads read it.
template <class T> struct WholeA {
    const T* packed;
    i64 padded;  // rows, rounded up to panels
    int mr;
    i64 pc = 0, kb = 0;

    void load(i64, i64, i64 pc_, i64 kb_) { pc = pc_, kb = kb_; }
    void multiply(i64 i, int m, int nv, const T* b, i64 ldb, const Target<T>& to) const {
        micro<T>(m, nv).packed(kb, packed + pc * padded + i * kb, mr, b, ldb, to);
    }
};

// Not packed: a Source has rows(i, mb, k, kb, table, segments, length), a pointer per segment and
// row.
template <class T, class Source> struct RowsA {
    Source& source;
    const T** table;
    i64 start = 0, mb = 0, segments = 0, length = 0;

    void load(i64 ic, i64 mb_, i64 pc, i64 kb) {
        start = ic, mb = mb_;
        source.rows(ic, mb, pc, kb, table, segments, length);
    }
    void multiply(i64 i, int m, int nv, const T* b, i64 ldb, const Target<T>& to) const {
        micro<T>(m, nv).rows(segments, length, table + (i - start), mb, b, ldb, to);
    }
};

// A transposed matrix, read as it lies: data[k * ld + i].
template <class T> struct TransposedA {
    const T* data;
    i64 ld, pc = 0, kb = 0;

    void load(i64, i64, i64 pc_, i64 kb_) { pc = pc_, kb = kb_; }
    void multiply(i64 i, int m, int nv, const T* b, i64 ldb, const Target<T>& to) const {
        micro<T>(m, nv).packed(kb, data + pc * ld + i, ld, b, ldb, to);
    }
};

// -- B --------------------------------------------------------------------------------------------

template <class T, class Source> struct PackedB {
    const Source& source;
    i64 ld;
    T* buffer;
    i64 start = 0, kb = 0;

    void load(i64 jc, i64 nb, i64 pc, i64 kb_) {
        start = jc, kb = kb_;
        PacksAll<Source, T>::run(source, jc, nb, pc, kb, ld, buffer);
    }
    const T* panel(i64 j) const { return buffer + (j - start) * kb; }
};

template <class T> struct WholeB {
    const T* packed;
    i64 padded;  // columns, rounded up to panels
    i64 ld;
    i64 pc = 0, kb = 0;

    void load(i64, i64, i64 pc_, i64 kb_) { pc = pc_, kb = kb_; }
    const T* panel(i64 j) const { return packed + pc * padded + j * kb; }
};

// A matrix whose rows are read as they lie.
template <class T> struct MatrixB {
    const T* data;
    i64 ld, pc = 0;

    void load(i64, i64, i64 pc_, i64) { pc = pc_; }
    const T* panel(i64 j) const { return data + pc * ld + j; }
};

inline i64 round_up(i64 value, i64 unit) { return (value + unit - 1) / unit * unit; }

// [block of k][panel][k][width], by all threads.
template <class T, class Source>
void pack_whole(const Source& source, i64 count, i64 k, i64 kc, i64 width, T* to, int threads) {
    const i64 padded = round_up(count, width), panels = padded / width;
    parallel(threads, [&](int index, int total) {
        const Range mine = part(panels, 1, index, total);
        for (i64 pc = 0; pc < k; pc += kc) {
            const i64 kb = std::min(kc, k - pc);
            for (i64 j = mine.begin * width; j < mine.end * width; j += width)
                source.pack(j, std::min(width, count - j), pc, kb, width,
                            to + pc * padded + j * kb);
        }
    });
}

// -- C --------------------------------------------------------------------------------------------

// Bias and ReLU are applied to a tile while it is in the first-level cache.
template <class T> struct Epilogue {
    const T* row_bias = nullptr;     // one number for each row of C
    const T* column_bias = nullptr;  // one number for each column of C
    bool relu = false;

    bool any() const { return row_bias || column_bias || relu; }
    void apply(T* c, i64 i, i64 j, i64 count) const {
        const T shift = row_bias ? row_bias[i] : T(0);
        for (i64 t = 0; t < count; t++) {
            T value = c[t] + shift + (column_bias ? column_bias[j + t] : T(0));
            c[t] = relu && value < 0 ? T(0) : value;
        }
    }
};

template <class T> inline void write(T* to, const T* from, i64 count, bool accumulate) {
    if (accumulate) add(to, from, count);
    else copy(to, from, count);
}

// A plain matrix, rows contiguous.
template <class T> struct MatrixC {
    T* data;
    i64 ld;
    Epilogue<T> epilogue = {};
    bool keep = false;  // add to what is there

    bool sums(i64 k) const { return keep || k > 0; }
    T* direct(i64 i, i64 j, i64, i64& ldc) const {
        ldc = ld;
        return data + i * ld + j;
    }
    void add(i64 i, i64 j, int m, i64 n, const T* tile, i64 ldt, bool accumulate) const {
        for (int t = 0; t < m; t++) write(data + (i + t) * ld + j, tile + t * ldt, n, accumulate);
    }
    void finish(i64 i, i64 j, int m, i64 n) const {
        if (!epilogue.any()) return;
        for (int t = 0; t < m; t++) epilogue.apply(data + (i + t) * ld + j, i + t, j, n);
    }
};

// Columns are the pixels of a whole batch of planar images: a tile may span several images.
template <class T> struct ImagesC {
    T* data;
    i64 image, pixels;  // elements between images; pixels of a channel
    Epilogue<T> epilogue = {};

    bool sums(i64 k) const { return k > 0; }
    T* at(i64 i, i64 j) const { return data + j / pixels * image + i * pixels + j % pixels; }
    T* direct(i64 i, i64 j, i64 n, i64& ldc) const {
        ldc = pixels;
        return j % pixels + n <= pixels ? at(i, j) : nullptr;
    }
    template <class Do> void runs(i64 j, i64 n, Do run) const {
        for (i64 t = 0; t < n;) {
            const i64 count = std::min(n - t, pixels - (j + t) % pixels);
            run(t, count);
            t += count;
        }
    }
    void add(i64 i, i64 j, int m, i64 n, const T* tile, i64 ldt, bool accumulate) const {
        runs(j, n, [&](i64 t, i64 count) {
            T* to = at(i, j + t);
            for (int row = 0; row < m; row++)
                write(to + row * pixels, tile + row * ldt + t, count, accumulate);
        });
    }
    void finish(i64 i, i64 j, int m, i64 n) const {
        if (!epilogue.any()) return;
        runs(j, n, [&](i64 t, i64 count) {
            for (int row = 0; row < m; row++)
                epilogue.apply(at(i + row, j + t), i + row, j + t, count);
        });
    }
};

// -- threads --------------------------------------------------------------------------------------

struct Share {
    Range rows, columns;
};

// Threads share the columns; where there are too few panels of them, the rows too.
inline Share share(i64 m, i64 n, Tile tile, i64 nr, int index, int threads) {
    const i64 across = std::min<i64>(threads, std::max<i64>(1, (n + nr - 1) / nr));
    const i64 down = threads / across;
    if (index >= across * down) return {{0, 0}, {0, 0}};
    return {part(m, tile.mr, index / across, down), part(n, nr, index % across, across)};
}

}  // namespace shardwise
