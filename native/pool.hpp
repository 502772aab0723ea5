// Max pooling of channels-last images; which tap was the largest is kept in one byte. Windows have
// no dilation, so that each of them has a pixel of the image.
#pragma once

#include <vector>

#include "norm.hpp"

namespace shardwise {

struct Windows {
    i64 n, c, h, w, p, q, r, s;
    i64 stride_h, stride_w, pad_h, pad_w, threads;
};

// A tap of the window, and where in the other tensor it is found.
struct Tap {
    i64 offset;
    int number;
};

using Byte = unsigned char;

// The numbers of taps, one for each lane.
template <class T> struct Numbers {
    using Int = typename Index<T>::type;
    typedef Int wide __attribute__((vector_size(SW_VECTOR_BYTES)));
    wide of;

    explicit Numbers(int number) : of(wide{} + (Int)number) {}
    // Where `value` is larger, or no number at all, it takes the place of `best`.
    void take(vec<T> value, int number, vec<T>& best) {
        const auto more = (value > best) | (value != value);
        best = more ? value : best;
        of = more ? wide{} + (Int)number : of;
    }
    void save(Byte* to, i64 used) const {
        for (i64 lane = 0; lane < used; lane++) to[lane] = (Byte)of[lane];
    }
    // The lanes of dy whose window chose this tap; zeros elsewhere.
    static vec<T> chosen(const Byte* which, int number, const T* dy, i64 used) {
        vec<T> out = {};
        for (i64 lane = 0; lane < used; lane++)
            if (which[lane] == number) out[lane] = dy[lane];
        return out;
    }
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)
template <> struct Numbers<float> {
    __m512i of;

    explicit Numbers(int number) : of(_mm512_set1_epi32(number)) {}
    void take(vec<float> value, int number, vec<float>& best) {
        const __mmask16 more = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ) |
                               _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        best = _mm512_mask_mov_ps(best, more, value);
        of = _mm512_mask_set1_epi32(of, more, number);
    }
    void save(Byte* to, i64 used) const {
        _mm512_mask_cvtepi32_storeu_epi8(to, (__mmask16)((1u << used) - 1), of);
    }
    static vec<float> chosen(const Byte* which, int number, const float* dy, i64 used) {
        const __mmask16 mine = (__mmask16)((1u << used) - 1);
        const __m128i bytes = _mm_maskz_loadu_epi8(mine, which);
        const __mmask16 here = _mm_mask_cmpeq_epi8_mask(mine, bytes, _mm_set1_epi8((char)number));
        return _mm512_maskz_loadu_ps(here, dy);
    }
};
#endif

// The largest of the taps and its number: the first of equal ones; a NaN counts as the largest.
template <class T>
void largest(const T* x, const Tap* taps, int count, i64 channels, T* y, Byte* which) {
    for (i64 c = 0; c < channels; c += lanes<T>) {
        const i64 used = std::min<i64>(lanes<T>, channels - c);
        vec<T> best = read(x + taps[0].offset + c, used);
        Numbers<T> numbers(taps[0].number);
        for (int t = 1; t < count; t++)
            numbers.take(read(x + taps[t].offset + c, used), taps[t].number, best);
        put<T>(y + c, best, used);
        numbers.save(which + c, used);
    }
}

using Taps = std::vector<Tap>;

// Along one dimension: the inputs of each output's window, or the outputs whose windows have an
// input.
inline std::vector<Taps> along(i64 size, i64 outs, i64 taps, i64 stride, i64 pad, bool by_input) {
    std::vector<Taps> found((std::size_t)(by_input ? size : outs));
    for (i64 out = 0; out < outs; out++)
        for (i64 tap = 0; tap < taps; tap++) {
            const i64 in = out * stride - pad + tap;
            if (in < 0 || in >= size) continue;
            if (by_input) found[in].push_back({out, (int)tap});
            else found[out].push_back({in, (int)tap});
        }
    return found;
}

// visit(pixel, taps) for every pixel of y, or of dx: threads share the lines.
template <class Visit> void each_pixel(const Windows& g, bool by_input, Visit visit) {
    const auto rows = along(g.h, g.p, g.r, g.stride_h, g.pad_h, by_input);
    const auto columns = along(g.w, g.q, g.s, g.stride_w, g.pad_w, by_input);
    const i64 height = (i64)rows.size(), width = (i64)columns.size();
    const i64 other_height = by_input ? g.p : g.h, other_width = by_input ? g.q : g.w;
    parallel((int)g.threads, [&](int index, int total) {
        const Range mine = part(g.n * height, 1, index, total);
        Taps taps((std::size_t)(g.r * g.s));
        for (i64 line = mine.begin; line < mine.end; line++) {
            const i64 image = line / height * other_height;
            for (i64 at = 0; at < width; at++) {
                int count = 0;
                for (const Tap& row : rows[line % height])
                    for (const Tap& column : columns[at])
                        taps[count++] = {((image + row.offset) * other_width + column.offset) * g.c,
                                         row.number * (int)g.s + column.number};
                visit(line * width + at, taps.data(), count);
            }
        }
    });
}

template <class T> void pool_forward(const Windows& g, const T* x, T* y, Byte* which) {
    each_pixel(g, false, [&](i64 pixel, const Tap* taps, int count) {
        largest(x, taps, count, g.c, y + pixel * g.c, which + pixel * g.c);
    });
}

// Each pixel of dx asks the windows it lies in whether it was their largest: nothing is added to
// memory, so threads share the pixels and no zeros are written first.
template <class T> void pool_backward(const Windows& g, const T* dy, const Byte* which, T* dx) {
    each_pixel(g, true, [&](i64 pixel, const Tap* taps, int count) {
        for (i64 c = 0; c < g.c; c += lanes<T>) {
            const i64 used = std::min<i64>(lanes<T>, g.c - c);
            vec<T> sum = {};
            for (int t = 0; t < count; t++)
                sum += Numbers<T>::chosen(which + taps[t].offset + c, taps[t].number,
                                          dy + taps[t].offset + c, used);
            put<T>(dx + pixel * g.c + c, sum, used);
        }
    });
}

}  // namespace shardwise
