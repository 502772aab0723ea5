// Workspaces: kernels take what they need from one block of memory, all kernels from the same one.
#pragma once

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "simd.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define SW_FENCE(start, bytes) ASAN_POISON_MEMORY_REGION(start, bytes)
#define SW_OPEN(start, bytes) ASAN_UNPOISON_MEMORY_REGION(start, bytes)
constexpr std::size_t fence_bytes = 64;  // between two buffers of a workspace
#else
#define SW_FENCE(start, bytes) (void)0
#define SW_OPEN(start, bytes) (void)0
constexpr std::size_t fence_bytes = 0;
#endif

namespace shardwise {

// A kernel takes all its buffers first. Without a base it is only measured: `if (s.measuring())
// return` follows the takes, so that the size asked for is the size used.
class Scratch {
  public:
    explicit Scratch(char* base) : base(base) {}
    bool measuring() const { return base == nullptr; }
    std::size_t bytes() const { return used; }

    template <class T> T* take(i64 count) {
        used = (used + 63) / 64 * 64;
        T* start = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += (std::size_t)count * sizeof(T);
        const std::size_t end = (used + 63) / 64 * 64;
        if (base && fence_bytes) SW_FENCE(base + end, fence_bytes);
        if (fence_bytes) used = end + fence_bytes;
        return start;
    }

  private:
    char* base;
    std::size_t used = 0;
};

// P1's persistent memory, but one block for all layers: it grows to the largest need and stays.
// Calls at the same time from several threads get a block each.
class Arena {
  public:
    struct Block {
        char* data;
        std::size_t bytes;
    };

    // Only a block that stays is worth huge pages: they take long to get.
    Block take(std::size_t bytes, bool keep) {
        {
            std::lock_guard<std::mutex> hold(mutex);
            if (!free.empty()) {
                Block block = free.back();
                free.pop_back();
                if (block.bytes >= bytes) return block;
                held -= block.bytes;
                std::free(block.data);
            }
        }
        const std::size_t page = keep && bytes >= huge_page ? huge_page : 4096;
        bytes = (bytes + page - 1) / page * page;
        char* data = static_cast<char*>(std::aligned_alloc(page, bytes));
#if defined(MADV_HUGEPAGE)
        // Transforms write to dozens of planes at once: with small pages, each misses the TLB.
        if (data && page == huge_page) madvise(data, bytes, MADV_HUGEPAGE);
#endif
        std::lock_guard<std::mutex> hold(mutex);
        if (data) held += bytes;
        if (held > peak) peak = held;
        return {data, bytes};
    }

    void give_back(Block block, bool keep) noexcept {
        SW_OPEN(block.data, block.bytes);
        std::lock_guard<std::mutex> hold(mutex);
        if (keep) try {
            return free.push_back(block);
        } catch (const std::bad_alloc&) {  // of the list: then the block does not stay
        }
        held -= block.bytes;
        std::free(block.data);
    }

    void release() {
        std::lock_guard<std::mutex> hold(mutex);
        for (auto& block : free) {
            held -= block.bytes;
            std::free(block.data);
        }
        free.clear();
        peak = held;
    }

    std::size_t peak_bytes() {
        std::lock_guard<std::mutex> hold(mutex);
        return peak;
    }

  private:
    static constexpr std::size_t huge_page = 2 << 20;
    std::mutex mutex;
    std::vector<Block> free;
    std::size_t held = 0, peak = 0;
};

// A block for as long as a kernel runs, however that ends.
class Lease {
  public:
    Lease(Arena& arena, std::size_t bytes, bool keep)
        : arena(arena), keep(keep), block(arena.take(bytes, keep)) {}
    ~Lease() {
        if (block.data) arena.give_back(block, keep);
    }
    Lease(const Lease&) = delete;
    char* data() const { return block.data; }  // or null: there is no memory

  private:
    Arena& arena;
    bool keep;
    Arena::Block block;
};

}  // namespace shardwise
