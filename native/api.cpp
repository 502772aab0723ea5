// The plain C interface: raw pointers, no exceptions, a status for every call.
#include "base.hpp"
#include "deconvgemm.hpp"
#include "depthwise.hpp"
#include "direct.hpp"
#include "norm_conv.hpp"
#include "pool.hpp"
#include "reindex.hpp"
#include "tapwise.hpp"
#include "winograd.hpp"

namespace shardwise {

enum Direction { forward, backward_data, backward_filter };

template <class T> using Kernel = void (*)(const Problem&, Tensors<T>, Scratch&);

struct Entry {
    const char* name;
    Kernel<float> single[3];  // by direction; null where there is none
    Kernel<double> both[3];
    bool (*takes)(const Problem&, int direction);
};

bool any(const Problem&, int) { return true; }
bool unit_stride_backward(const Problem& g, int direction) {
    return direction == forward || g.unit_stride();
}

const Entry entries[] = {
    {"base",
     {base_forward<float>, base_backward<float>, base_filter<float>},
     {base_forward<double>, base_backward<double>, base_filter<double>},
     any},
    {"convgemm",
     {convgemm_forward<float>, convgemm_backward<float>, nullptr},
     {convgemm_forward<double>, convgemm_backward<double>, nullptr},
     unit_stride_backward},
    {"convgemm_trans",
     {nullptr, nullptr, convgemm_trans<float>},
     {nullptr, nullptr, convgemm_trans<double>},
     any},
    {"deconvgemm",
     {nullptr, deconvgemm<float>, nullptr},
     {nullptr, deconvgemm<double>, nullptr},
     any},
    {"reindex", {nullptr, nullptr, reindex<float>}, {nullptr, nullptr, reindex<double>}, flat},
    {"tapwise", {nullptr, nullptr, tapwise<float>}, {nullptr, nullptr, tapwise<double>}, any},
    {"direct",
     {direct_forward<float>, nullptr, direct_filter<float>},
     {direct_forward<double>, nullptr, direct_filter<double>},
     direct_takes},
    {"depthwise",
     {depthwise_forward<float>, depthwise_backward<float>, depthwise_filter<float>},
     {depthwise_forward<double>, depthwise_backward<double>, depthwise_filter<double>},
     depthwise_takes},
    {"winograd2",
     {winograd_forward<2>, winograd_backward<2>, winograd_filter<2>},
     {nullptr, nullptr, nullptr},
     winograd_takes},
    {"winograd4",
     {winograd_forward<4>, winograd_backward<4>, winograd_filter<4>},
     {nullptr, nullptr, nullptr},
     winograd_takes},
};
constexpr int num_entries = sizeof(entries) / sizeof(entries[0]);

Arena& arena() {
    static Arena* one = new Arena;
    return *one;
}

template <class T> Kernel<T> find(const Entry& entry, int direction);
template <> Kernel<float> find<float>(const Entry& entry, int direction) {
    return entry.single[direction];
}
template <> Kernel<double> find<double>(const Entry& entry, int direction) {
    return entry.both[direction];
}

template <class T>
i64 measure(const Entry& entry, int direction, const Problem& g, const void* columns = nullptr) {
    const Kernel<T> kernel = find<T>(entry, direction);
    if (!kernel || !entry.takes(g, direction)) return -1;
    Scratch scratch(nullptr);
    Tensors<T> none{};
    none.columns = static_cast<const T*>(columns);
    kernel(g, none, scratch);
    return (i64)scratch.bytes();
}

template <class T>
int run(const Entry& entry, int direction, const Problem& g, const void* x, const void* w,
        const void* y, const void* bias, void* out, const void* columns, bool keep) {
    const i64 bytes = measure<T>(entry, direction, g, columns);
    if (bytes < 0) return unsupported;
    const Lease block(arena(), (std::size_t)bytes + 64, keep);
    if (!block.data()) return no_memory;
    Scratch scratch(block.data());
    const Tensors<T> tensors{static_cast<const T*>(x), static_cast<const T*>(w),
                             static_cast<const T*>(y), static_cast<const T*>(bias),
                             static_cast<T*>(out), static_cast<const T*>(columns)};
    find<T>(entry, direction)(g, tensors, scratch);
    return done;
}

// work(zero) with a zero of the precision asked for.
template <class Work> int in_precision(int is_double, Work work) {
    return guarded([&] {
        if (is_double) work(0.0);
        else work(0.0f);
        return done;
    });
}

// work(scratch) with a block of the size that it asks for.
template <class Work> void with_scratch(Work work) {
    Scratch size(nullptr);
    work(size);
    const Lease block(arena(), size.bytes() + 64, true);
    if (!block.data()) throw std::bad_alloc();
    Scratch scratch(block.data());
    work(scratch);
}

}  // namespace shardwise

using namespace shardwise;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* sw_kernel_name(int kernel) {
    return kernel >= 0 && kernel < num_entries ? entries[kernel].name : nullptr;
}

EXPORT const char* sw_cpu() { return blocks.cpu; }

// Counts the changes of this interface: Python does not use a library that was built for another.
EXPORT int sw_interface() { return 4; }

// Bytes of workspace, or -1 where the kernel does not take this problem.
EXPORT i64 sw_workspace(int kernel, int direction, int is_double, const Problem* g) {
    const Entry& entry = entries[kernel];
    i64 bytes = -1;
    guarded([&] {
        bytes = is_double ? measure<double>(entry, direction, *g)
                          : measure<float>(entry, direction, *g);
        return done;
    });
    return bytes;
}

EXPORT int sw_run(int kernel, int direction, int is_double, const Problem* g, const void* x,
                  const void* w, const void* y, const void* bias, void* out, const void* columns,
                  int keep) {
    const Entry& entry = entries[kernel];
    return guarded([&] {
        return is_double ? run<double>(entry, direction, *g, x, w, y, bias, out, columns, keep)
                         : run<float>(entry, direction, *g, x, w, y, bias, out, columns, keep);
    });
}

// The im2col matrix of a convolution of one group: [c, taps][pixel], or [pixel][taps, c].
EXPORT int sw_im2col(int is_double, const Problem* g, const void* x, void* columns) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        im2col(*g, (const T*)x, (T*)columns);
    });
}

// Batch norm in training, and the ReLU after it.
EXPORT int sw_norm_forward(int is_double, const Images* g, const void* x, const void* weight,
                           const void* bias, void* mean, void* inverse, void* running_mean,
                           void* running_variance, double momentum, double eps, int relu,
                           void* y) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        norm_forward<T>(*g, (const T*)x, {(const T*)weight, (const T*)bias, (T*)mean, (T*)inverse},
                        {(T*)running_mean, (T*)running_variance, momentum}, eps, relu != 0, (T*)y);
    });
}

EXPORT int sw_norm_backward(int is_double, const Images* g, const void* dy, const void* x,
                            const void* weight, const void* bias, void* mean, void* inverse,
                            int relu, void* dx, void* dweight, void* dbias) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        norm_backward<T>(*g, (const T*)dy, (const T*)x,
                         {(const T*)weight, (const T*)bias, (T*)mean, (T*)inverse}, relu != 0,
                         (T*)dx, (T*)dweight, (T*)dbias);
    });
}

// Batch norm in training, its ReLU and a pointwise convolution of channels-last images.
EXPORT int sw_norm_conv_forward(int is_double, const Problem* g, const void* x, const void* weight,
                                const void* bias, void* mean, void* inverse, void* running_mean,
                                void* running_variance, double momentum, double eps,
                                const void* w, const void* conv_bias, void* y) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        const Images images = images_of(*g);
        const Norm<T> norm{(const T*)weight, (const T*)bias, (T*)mean, (T*)inverse};
        norm_statistics<T>(images, (const T*)x, norm,
                           {(T*)running_mean, (T*)running_variance, momentum}, eps);
        const std::vector<T> scale = norm.scale(images), offset = norm.offset(images, scale);
        const Normalised<T> source{(const T*)x, g->c, scale.data(), offset.data()};
        with_scratch([&](Scratch& scratch) {
            norm_conv_forward<T>(*g, source, (const T*)w, (const T*)conv_bias, (T*)y, scratch);
        });
    });
}

// dw may be null: it is not wanted then.
EXPORT int sw_norm_conv_backward(int is_double, const Problem* g, const void* dy, const void* x,
                                 const void* weight, const void* bias, void* mean, void* inverse,
                                 const void* w, void* dx, void* dweight, void* dbias, void* dw) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        const Images images = images_of(*g);
        const Norm<T> norm{(const T*)weight, (const T*)bias, (T*)mean, (T*)inverse};
        const std::vector<T> scale = norm.scale(images), offset = norm.offset(images, scale);
        const Normalised<T> source{(const T*)x, g->c, scale.data(), offset.data()};
        if (dw)
            with_scratch([&](Scratch& scratch) {
                const NormalisedColumns<T> columns{source};
                trans_last(*g, (const T*)dy, columns, (T*)dw, scratch);
            });
        with_scratch([&](Scratch& scratch) {
            norm_conv_backward<T>(*g, (const T*)dy, source, norm, (const T*)w, (T*)dx, (T*)dweight,
                                  (T*)dbias, scratch);
        });
    });
}

// Max pooling of channels-last images with windows of at most 256 taps.
EXPORT int sw_pool_forward(int is_double, const Windows* g, const void* x, void* y, void* which) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        pool_forward<T>(*g, (const T*)x, (T*)y, (Byte*)which);
    });
}

EXPORT int sw_pool_backward(int is_double, const Windows* g, const void* dy, const void* which,
                            void* dx) {
    return in_precision(is_double, [&](auto zero) {
        using T = decltype(zero);
        pool_backward<T>(*g, (const T*)dy, (const Byte*)which, (T*)dx);
    });
}

EXPORT i64 sw_arena_peak() { return (i64)arena().peak_bytes(); }
EXPORT void sw_arena_release() { arena().release(); }

// The OpenMP runtime to use; without one, an own pool.
EXPORT void sw_use_runtime(void* parallel, void* number, void* count) {
    runtime() = {reinterpret_cast<GompParallel>(parallel), reinterpret_cast<ThreadNumber>(number),
                 reinterpret_cast<ThreadNumber>(count)};
}
