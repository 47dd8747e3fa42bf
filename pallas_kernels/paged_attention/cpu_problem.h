// What one call of paged attention is about, and where its keys and values lie; part of cpu.cc.

#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_

#include <math.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pallas_kernels {
namespace {

constexpr int kPiece = 16;              // keys that lie together in a page
constexpr int kBlock = 128;             // keys of one turn of the running softmax

enum class Type { kF32, kBF16, kS8, kF8 };

int64_t ItemBytes(Type type) { return type == Type::kF32 ? 4 : type == Type::kBF16 ? 2 : 1; }

// The numbers of float8_e4m3fn.
struct Float8 {
  float value[256];
  Float8() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, fraction = i & 7;
      float x = exponent ? ldexpf(8.0f + fraction, exponent - 10) : ldexpf(fraction, -9);
      if ((i & 127) == 127) x = NAN;
      value[i] = i & 128 ? -x : x;
    }
  }
};
const Float8 kFloat8;

struct Tile {
  int64_t row;                 // of the batch
  int64_t head, heads;         // KV heads
  int64_t token, tokens;       // its queries
  int64_t position;            // of the first one in its sequence
  int64_t begin, end;          // keys that some query of it sees
};

struct Range {
  int64_t begin, end;
};

// Keys and values that this thread reads next.
struct Ahead {
  const Tile* tile;            // null: nothing
  Range keys;
};

struct Problem {
  const void* q;               // [tokens, heads, dim]
  const char* kv;              // one layer: [pages, 2 * kv_heads, page_size, dim]
  const int32_t* page_table;   // [rows, width]
  const float* sinks;          // [heads] or null
  void* out;                   // like q
  Type q_type, kv_type;
  int64_t tokens, heads, dim, pages, kv_heads, group, page_size, rows, width;
  int64_t window;              // 0: none
  float scale, soft_cap;       // 0: none
  bool in_place;               // pieces can be read where they lie
  mutable std::atomic<int64_t> bad_page{-1};

  int64_t Rows(const Tile& tile) const { return tile.heads * tile.tokens * group; }
  int64_t FirstKey(int64_t position) const { return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0; }

  // Where the keys (half 0) or values (half 1) of a token lie.
  const void* Find(const Tile& tile, int64_t head, int half, int64_t key) const {
    int64_t page = page_table[tile.row * width + key / page_size];
    if (page < 0 || page >= pages) {
      bad_page = page < 0 ? pages : page;
      page = 0;
    }
    const int64_t plane = (page * kv_heads + head) * 2 + half;
    return kv + (plane * page_size + key % page_size) * dim * ItemBytes(kv_type);
  }
};

// Where the pieces of the next block of keys and values lie, one after another in the order in which pages hold them.
class Prefetcher {
 public:
  Prefetcher(const Problem& p, const Ahead& block) : p_(p), tile_(block.tile) {
    if (!tile_ || p.page_size % kPiece) return;
    begin_ = block.keys.begin / kPiece * kPiece;
    const int64_t end = std::min(block.keys.end, begin_ / kBlock * kBlock + kBlock);
    planes_ = 2 * tile_->heads, count_ = (end - begin_ + kPiece - 1) / kPiece * planes_;
  }

  // Null after the last one.
  const char* Next() {
    if (at_ >= count_) return nullptr;
    const int64_t plane = at_ % planes_, key = begin_ + at_ / planes_ * kPiece;
    ++at_;
    return static_cast<const char*>(p_.Find(*tile_, tile_->head + plane / 2, plane % 2, key));
  }

 private:
  const Problem& p_;
  const Tile* tile_;
  int64_t begin_ = 0, planes_ = 1, count_ = 0, at_ = 0;
};

// Asks for `bytes` that will be read soon.
inline void Prefetch(const char* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
}

}  // namespace
}  // namespace pallas_kernels

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
