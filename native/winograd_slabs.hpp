// Chunks of tiles that Winograd's kernels have at hand: some tile rows of some slices.
//
// A volume is transformed slice by slice: its depth stays a plain sum, in which a transformed slice
// counts for every output slice that reads it. So a slab has the slices around it too; of images,
// which have no depth, it has as many as fit.
#pragma once

#include "winograd_tiles.hpp"

namespace shardwise {

// Slices that follow each other: the images of a batch, or those of each volume.
struct Stacks {
    i64 count, inputs, outputs, taps, pad;

    static Stacks of(const Problem& g) {
        if (g.flat()) return {1, g.n, g.n, 1, 0};
        return {g.n, g.d, g.o, g.t, g.pad_d};
    }
};

struct Slab {
    i64 stack, slice, slices;  // of the outputs
    Range rows;
    i64 across;

    i64 tiles_of_slice() const { return rows.size() * across; }
    i64 tiles() const { return slices * tiles_of_slice(); }
    Range all(i64 halo) const { return {0, (slices + halo) * rows.size()}; }
};

// All slabs of a convolution, of about as many tiles as wanted.
struct Slabs {
    Stacks stacks;
    i64 down, across, slices, rows;

    static Slabs of(const Problem& g, const Tiling& t, i64 tiles) {
        const Stacks stacks = Stacks::of(g);
        const i64 wanted = std::max<i64>(1, tiles / t.across), outputs = stacks.outputs;
        i64 slices, rows;
        if (stacks.taps == 1) {  // whole images, if possible
            rows = equal_blocks(t.down, std::min(t.down, wanted));
            slices = equal_blocks(outputs, std::min(outputs, std::max<i64>(1, wanted / rows)));
        } else {  // deep, since the slices around a slab are transformed twice
            slices = equal_blocks(outputs, std::min(outputs, wanted));
            rows = equal_blocks(t.down, std::min(t.down, std::max<i64>(1, wanted / slices)));
        }
        return {stacks, t.down, t.across, slices, rows};
    }

    i64 halo() const { return stacks.taps - 1; }
    i64 deep() const { return (stacks.outputs + slices - 1) / slices; }
    i64 high() const { return (down + rows - 1) / rows; }
    i64 count() const { return stacks.count * deep() * high(); }
    i64 most_tiles() const { return slices * rows * across; }
    i64 most_inputs() const { return (slices + halo()) * rows * across; }
    Slab at(i64 index) const {
        const i64 slice = index / high() % deep() * slices, row = index % high() * rows;
        return {index / high() / deep(), slice, std::min(slices, stacks.outputs - slice),
                {row, std::min(down, row + rows)}, across};
    }
};

// visit(slice of the slab, its tile rows, the number of the first tile) for these tile rows.
template <class Visit> void each_slice(const Slab& slab, Range units, Visit visit) {
    const i64 rows = slab.rows.size();
    for (i64 unit = units.begin, count; unit < units.end; unit += count) {
        const i64 row = slab.rows.begin + unit % rows;
        count = std::min(rows - unit % rows, units.end - unit);
        visit(unit / rows, Range{row, row + count}, unit * slab.across);
    }
}

inline Range of_slice(const Tiling& t, i64 slice, Range rows) {
    return {slice * t.down + rows.begin, slice * t.down + rows.end};
}

// Some tile rows of the slab's slices and those around them; what is padding becomes zeros.
template <int M, class T>
void transform_slab(const Tiling& t, const Stacks& stacks, const Slab& slab, Range units,
                    const T* x, T* band, const Planes<T>& to) {
    constexpr int A = M + 2;
    each_slice(slab, units, [&](i64 local, Range rows, i64 tile) {
        const i64 slice = slab.slice + local - stacks.pad;
        if (!within(slice, stacks.inputs)) return to.zero(A * A, tile, rows.size() * t.across);
        transform_tiles<M, A, A>(t, x, of_slice(t, slab.stack * stacks.inputs + slice, rows), band,
                                 to, tile, input_line<M>{});
    });
}

// The errors of some tile rows of the slab.
template <int M, class T>
void transform_errors(const Tiling& t, const Stacks& stacks, const Slab& slab, Range units,
                      const T* dy, T* band, const Planes<T>& to) {
    each_slice(slab, units, [&](i64 local, Range rows, i64 tile) {
        const i64 slice = slab.stack * stacks.outputs + slab.slice + local;
        transform_tiles<M, M, M + 2>(t, dy, of_slice(t, slice, rows), band, to, tile,
                                     errors_line<M>{});
    });
}

template <int M, class T>
void store_slab(const Problem& g, const Tiling& t, const Stacks& stacks, const Slab& slab,
                const Planes<T>& from, i64 first_tile, Range channels, const T* bias, T* band,
                T* y) {
    each_slice(slab, slab.all(0), [&](i64 local, Range rows, i64 tile) {
        const i64 slice = slab.stack * stacks.outputs + slab.slice + local;
        store_tiles<M>(g, t, from, of_slice(t, slice, rows), first_tile + tile, channels, bias,
                       band, y);
    });
}

// Tiles of a slab as rows, k = (depth, channel): a depth further is a slice further.
template <class T> struct SlabRows {
    const T* data;
    i64 width, channels, slice;

    void rows(i64 i, i64 mb, i64 k, i64 kb, const T** table, i64& segments, i64& length) const {
        length = std::min(kb, channels), segments = kb / length;
        const T* from = data + (k / channels * slice + i) * width + k % channels;
        for (i64 s = 0; s < segments; s++)
            for (i64 t = 0; t < mb; t++) table[s * mb + t] = from + (s * slice + t) * width;
    }
};

// The block of k = (depth, channel): whole depths, or an equal part of one.
inline i64 block_of(i64 channels, i64 depths, i64 most) {
    if (depths == 1) return equal_blocks(channels, most);
    if (channels <= most) return channels * std::min(depths, most / channels);
    for (i64 parts = 2; parts <= 8; parts++)
        if (channels % parts == 0 && channels / parts <= most) return channels / parts;
    return channels;
}

}  // namespace shardwise
