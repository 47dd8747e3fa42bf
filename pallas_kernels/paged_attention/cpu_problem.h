// What one call of paged attention is about, and where its keys and values lie; part of cpu.cc.

#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace pallas_kernels {
namespace {

constexpr int kPiece = 16;              // keys that lie together in a page
constexpr int kBlock = 128;             // keys of one turn of the running softmax
constexpr int kAheadPieces = 4;         // how far ahead of its use a piece is asked for

enum class Type { kF32, kBF16, kS8, kF8 };

int64_t ItemBytes(Type type) { return type == Type::kF32 ? 4 : type == Type::kBF16 ? 2 : 1; }

enum class Float8 : uint8_t {};  // float8_e4m3fn

// Of pieces that hold T.
template <class T>
constexpr Type TypeOf() {
  if (std::is_same<T, Float8>::value) return Type::kF8;
  return sizeof(T) == 4 ? Type::kF32 : sizeof(T) == 2 ? Type::kBF16 : Type::kS8;
}

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
  mutable std::atomic<int64_t> bad_page{-1};

  bool WholePieces() const { return page_size % kPiece == 0; }  // else they are gathered before use
  int64_t Rows(const Tile& tile) const { return tile.heads * tile.tokens * group; }
  int64_t FirstKey(int64_t position) const { return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0; }

  // How many pieces from `key` on hold keys that are not after the tile's query `row` of a head.
  int Pieces(const Tile& tile, int row, int64_t key) const {
    return static_cast<int>(std::max<int64_t>(tile.position + row / group + kPiece - key, 0) / kPiece);
  }

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

// Where the pieces lie that are read soon: those of `now`, then of `after`, in the order in which Segment reads them.
class Prefetcher {
 public:
  // Leaves out the first kAheadPieces, which were asked for before `now` began.
  Prefetcher(const Problem& p, const Ahead& now, const Ahead& after) : p_(p), after_(after) {
    Enter(p.page_size % kPiece ? Ahead{} : now);
    for (int i = 0; i < kAheadPieces; ++i) Step();
  }

  // Null after the last one.
  const char* Next() {
    if (!now_.tile) return nullptr;
    const void* piece = p_.Find(*now_.tile, now_.tile->head + head_, half_, key_);
    Step();
    return static_cast<const char*>(piece);
  }

 private:
  void Enter(const Ahead& keys) {
    now_ = keys, head_ = 0, half_ = 0, key_ = keys.keys.begin / kPiece * kPiece;
    if (keys.tile && keys.keys.begin >= keys.keys.end) now_.tile = nullptr;
  }

  void Step() {
    if (!now_.tile) return;
    key_ += kPiece;
    const int64_t block = (key_ - 1) / kBlock * kBlock;
    if (key_ < std::min(block + kBlock, now_.keys.end)) return;
    const bool is_last = half_ == 1 && head_ + 1 == now_.tile->heads;
    if (!is_last) key_ = std::max(block, now_.keys.begin / kPiece * kPiece);
    if (half_ == 1) head_ = is_last ? 0 : head_ + 1;
    half_ = 1 - half_;
    if (key_ < now_.keys.end) return;
    Enter(after_);
    after_ = Ahead{};
  }

  const Problem& p_;
  Ahead now_{}, after_;
  int64_t head_ = 0, key_ = 0;
  int half_ = 0;
};

// Asks for `bytes` that will be read soon.
inline void Prefetch(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(data) + at, 0, 3);
}

}  // namespace
}  // namespace pallas_kernels

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
