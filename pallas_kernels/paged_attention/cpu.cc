// Paged attention on the CPU: reads pages where they lie, on XLA's own threads. The contract is in __init__.py.
//
// A tile is a few tokens of one row of the batch: up to kTileRows queries, of one KV head or, where tokens are few, of
// several, whose keys lie together in a page. Its keys are taken in segments of kSegment; each is a softmax of its
// own, and those are joined in order. Blocks, segments and every sum are cut at fixed positions of the sequence, so a
// query's result depends on its own keys alone: not on its batch mates, on how its prompt was cut into chunks, or on
// the threads.

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pallas_kernels/native/parallel.h"
#include "pallas_kernels/native/processor.h"
#include "pallas_kernels/paged_attention/cpu_problem.h"

namespace pallas_kernels {
namespace {

namespace ffi = xla::ffi;

constexpr int kPieces = 4;              // pieces of a run
constexpr int kRun = kPiece * kPieces;  // keys that are read at once: they stay in the first cache
constexpr int64_t kSegment = 512;       // keys of a softmax of its own
constexpr int64_t kTileRows = 96;
constexpr int64_t kFewRows = 12;        // queries of a KV head up to which pieces are widened as they are read
constexpr int64_t kSplitTokens = 8;     // tiles of so few tokens are spread over threads by segments
constexpr float kFloor = -1e30f;        // finite, so that nothing seen yet gives 0 and no NaN

template <class T>
struct Run {
  const T* data[kPieces];  // [kPiece, dim] each
  const T* next[kPieces];  // pieces to ask for meanwhile, or null
  int from[kPieces], to[kPieces];
  int pieces;

  // The first ones of `next` are on their way.
  void Asked(int count) { std::fill(next, next + count, nullptr); }
};

struct Softmax {
  float *largest, *total, *sums;  // [rows], [rows], [rows, dim]

  static int64_t Floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
  static Softmax At(float* memory, int64_t rows, int64_t dim) {
    return {memory + rows * dim, memory + rows * (dim + 1), memory};
  }
  Softmax From(int64_t row, int64_t dim) const { return {largest + row, total + row, sums + row * dim}; }
  void Clear(int64_t rows, int64_t dim) const {
    std::fill(largest, largest + rows, kFloor);
    std::fill(total, total + rows, 0.0f);
    std::fill(sums, sums + rows * dim, 0.0f);
  }
};

struct Scratch {
  float *q, *scores, *staged;
  Softmax part, all;
};

// This thread's memory for tiles of `rows`; kept for the next call.
Scratch Borrow(int64_t rows, int64_t dim) {
  static thread_local std::vector<float> memory;
  const int64_t q = rows * dim, scores = rows * kBlock, staged = kRun * dim, state = Softmax::Floats(rows, dim);
  const int64_t needed = q + scores + staged + 2 * state + 16;
  if (static_cast<int64_t>(memory.size()) < needed) memory.assign(needed, 0.0f);
  float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
  Scratch w;
  w.q = at, w.scores = w.q + q, w.staged = w.scores + scores;
  w.part = Softmax::At(w.staged + staged, rows, dim);
  w.all = Softmax::At(w.staged + staged + state, rows, dim);
  return w;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Shuffle4 __attribute__((vector_size(16)));
typedef int32_t Shuffle8 __attribute__((vector_size(32)));
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, Shuffle4{__VA_ARGS__})
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, Shuffle8{__VA_ARGS__})
#endif

namespace plain {  // SSE2, NEON or whatever vectors of four floats become
#define ISA_TARGET
#define ISA_LANES 4
#define ISA_ROWS 3
#include "pallas_kernels/paged_attention/cpu_kernel.h"
#undef ISA_TARGET
#undef ISA_LANES
#undef ISA_ROWS
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define ISA_TARGET __attribute__((target("avx2,fma")))
#define ISA_LANES 8
#define ISA_ROWS 3
#include "pallas_kernels/paged_attention/cpu_kernel.h"
#undef ISA_TARGET
#undef ISA_LANES
#undef ISA_ROWS
}  // namespace avx2

namespace avx512 {
#define ISA_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define ISA_LANES 16
#define ISA_ROWS 6
#include "pallas_kernels/paged_attention/cpu_kernel.h"
#undef ISA_TARGET
#undef ISA_LANES
#undef ISA_ROWS
}  // namespace avx512
#endif

struct Kernels {
  void (*load_queries)(const Problem&, const Tile&, float*);
  void (*segment)(const Problem&, const Tile&, Range, const Ahead&, const Scratch&);
  void (*join)(const Softmax&, const Softmax&, int, int64_t);
};

Kernels KernelsFor(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return {avx512::LoadQueries, avx512::Segment, avx512::Join};
  if (set == InstructionSet::kAvx2) return {avx2::LoadQueries, avx2::Segment, avx2::Join};
#endif
  return {plain::LoadQueries, plain::Segment, plain::Join};
}

int64_t Segments(const Tile& tile) {
  return tile.end > tile.begin ? (tile.end + kSegment - 1) / kSegment - tile.begin / kSegment : 0;
}

// The tile's keys in its index-th segment.
Range SegmentOf(const Tile& tile, int64_t index) {
  const int64_t start = (tile.begin / kSegment + index) * kSegment;
  return {std::max(start, tile.begin), std::min(start + kSegment, tile.end)};
}

// Before any key: a sink counts as a key that was seen and gives nothing.
void Begin(const Problem& p, const Tile& tile, const Softmax& all) {
  const int64_t rows = p.Rows(tile), each = tile.tokens * p.group;
  std::fill(all.sums, all.sums + rows * p.dim, 0.0f);
  for (int64_t m = 0; m < rows; ++m) {
    const float sink = p.sinks ? p.sinks[(tile.head + m / each) * p.group + m % p.group] : -INFINITY;
    all.largest[m] = std::max(sink, kFloor);
    all.total[m] = sink > kFloor ? 1.0f : 0.0f;
  }
}

uint16_t RoundToBF16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Writes the tile's results: weighted sums over total weights, 0 where nothing was seen.
void Finish(const Problem& p, const Tile& tile, const Softmax& all) {
  const int64_t each = tile.tokens * p.group;
  for (int64_t m = 0; m < p.Rows(tile); ++m) {
    const int64_t head = (tile.head + m / each) * p.group + m % p.group;
    const int64_t at = ((tile.token + m % each / p.group) * p.heads + head) * p.dim;
    const float factor = all.total[m] == 0.0f ? 0.0f : 1.0f / all.total[m];
    const float* sums = all.sums + m * p.dim;
    if (p.q_type == Type::kF32) {
      float* out = static_cast<float*>(p.out) + at;
      for (int64_t h = 0; h < p.dim; ++h) out[h] = sums[h] * factor;
    } else {
      uint16_t* out = static_cast<uint16_t*>(p.out) + at;
      for (int64_t h = 0; h < p.dim; ++h) out[h] = RoundToBF16(sums[h] * factor);
    }
  }
}

// Cuts the live rows into tiles, those with most keys first. Returns what is wrong with the batch, "" if nothing.
std::string Cut(const Problem& p, const int32_t* kv_lens, const int32_t* cu_q_lens, int64_t live,
                std::vector<Tile>& tiles) {
  const int64_t most = std::max<int64_t>(kTileRows / p.group, 1);
  for (int64_t row = 0; row < live; ++row) {
    const int64_t start = cu_q_lens[row], stop = cu_q_lens[row + 1], kv_len = kv_lens[row];
    const std::string where = "row " + std::to_string(row) + ": ";
    if (start < 0 || stop < start || stop > p.tokens) {
      return where + "its tokens " + std::to_string(start) + " ... " + std::to_string(stop) + " are not among the " +
             std::to_string(p.tokens) + " of q";
    }
    if (kv_len > p.width * p.page_size) return where + "kv_len " + std::to_string(kv_len) + " exceeds its pages";
    for (int64_t token = start; token < stop; token += most) {
      Tile tile;
      tile.row = row, tile.head = 0, tile.heads = p.kv_heads, tile.token = token;
      tile.tokens = std::min(most, stop - token);
      tile.position = kv_len - (stop - token);
      tile.begin = p.FirstKey(tile.position);
      tile.end = std::max(tile.position + tile.tokens, tile.begin);
      tiles.push_back(tile);
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    return (a.end - a.begin) * a.tokens > (b.end - b.begin) * b.tokens;
  });
  return "";
}

// What one thread does at a time: all segments of a tile, or one of them.
struct Item {
  Tile tile;
  int64_t segment;             // -1: all
  int64_t part, left;          // where the tile's segments lie among the parts; its counter
};

class Call {
 public:
  Call(const Problem& p, const std::vector<Tile>& tiles, const Kernels& kernels, int64_t threads)
      : p_(p), kernels_(kernels), threads_(threads) {
    Share(tiles, kTileRows);
    if (static_cast<int64_t>(items_.size()) < 2 * threads) Share(tiles, 1);
    parts_.reset(new float[part_count_ * part_floats_]);
    left_.reset(new std::atomic<int64_t>[items_.size()]);
    for (const Item& item : items_) {
      if (item.segment == 0) left_[item.left] = Segments(item.tile);
    }
  }

  void Run(ffi::ThreadPool& pool) {
    const int64_t workers = std::min<int64_t>(threads_, items_.size());
    ParallelFor(pool, workers, [this](int64_t) {
      const Item* next = Claim();
      while (const Item* item = next) {
        next = Claim();  // known early, so that its first keys are on their way when it begins
        Work(*item, next);
      }
    });
  }

 private:
  // Cuts the tiles into items of KV heads with up to `rows` rows in all, or of one head.
  void Share(const std::vector<Tile>& tiles, int64_t rows) {
    items_.clear();
    part_count_ = part_floats_ = 0;
    int64_t counters = 0;
    for (const Tile& whole : tiles) {
      const int64_t segments = Segments(whole), each = whole.tokens * p_.group;
      const int64_t heads = std::clamp<int64_t>(rows / each, 1, p_.kv_heads);
      const bool split = segments > 1 && whole.tokens <= kSplitTokens;
      for (int64_t head = 0; head < p_.kv_heads; head += heads) {
        Item item{whole, -1, part_count_, counters};
        item.tile.head = head, item.tile.heads = std::min(heads, p_.kv_heads - head);
        if (!split) items_.push_back(item);
        for (item.segment = 0; split && item.segment < segments; ++item.segment) items_.push_back(item);
        if (split) part_count_ += segments, ++counters;
      }
      most_rows_ = std::max(most_rows_, each * heads);
      if (split) part_floats_ = std::max(part_floats_, Softmax::Floats(each * heads, p_.dim));
    }
  }

  const Item* Claim() {
    const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
    return i < items_.size() ? &items_[i] : nullptr;
  }

  void Work(const Item& item, const Item* next) {
    const Tile& tile = item.tile;
    const int64_t segments = Segments(tile);
    const Scratch w = Borrow(most_rows_, p_.dim);
    const Ahead after = next ? Ahead{&next->tile, SegmentOf(next->tile, std::max<int64_t>(next->segment, 0))} : Ahead{};
    kernels_.load_queries(p_, tile, w.q);
    if (item.segment < 0) {
      if (segments == 1 && !p_.sinks) {  // nothing to join with
        kernels_.segment(p_, tile, SegmentOf(tile, 0), after, w);
        return Finish(p_, tile, w.part);
      }
      Begin(p_, tile, w.all);
      for (int64_t s = 0; s < segments; ++s) {
        const Ahead next_keys = s + 1 < segments ? Ahead{&tile, SegmentOf(tile, s + 1)} : after;
        kernels_.segment(p_, tile, SegmentOf(tile, s), next_keys, w);
        kernels_.join(w.all, w.part, static_cast<int>(p_.Rows(tile)), p_.dim);
      }
      Finish(p_, tile, w.all);
      return;
    }
    Scratch mine = w;
    mine.part = Part(item, item.segment);
    kernels_.segment(p_, tile, SegmentOf(tile, item.segment), after, mine);
    if (left_[item.left].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Begin(p_, tile, w.all);  // the last one joins them all
    for (int64_t s = 0; s < segments; ++s) {
      kernels_.join(w.all, Part(item, s), static_cast<int>(p_.Rows(tile)), p_.dim);
    }
    Finish(p_, tile, w.all);
  }

  Softmax Part(const Item& item, int64_t segment) const {
    return Softmax::At(parts_.get() + (item.part + segment) * part_floats_, p_.Rows(item.tile), p_.dim);
  }

  const Problem& p_;
  const Kernels kernels_;
  const int64_t threads_;
  std::vector<Item> items_;
  std::atomic<size_t> next_{0};
  int64_t most_rows_ = 1, part_count_ = 0, part_floats_ = 0;
  std::unique_ptr<float[]> parts_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
};

Type TypeOf(ffi::DataType type) {
  if (type == ffi::BF16) return Type::kBF16;
  if (type == ffi::S8) return Type::kS8;
  return type == ffi::F32 ? Type::kF32 : Type::kF8;
}

ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::S32> layer,
                          ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> kv_lens,
                          ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                          ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out, float scale, float soft_cap,
                          int64_t window, std::string_view isa) {
  const auto tokens = q.dimensions(), pages = kv_pages.dimensions(), table = page_table.dimensions();
  Problem p;
  p.q = q.untyped_data(), p.out = out->untyped_data(), p.page_table = page_table.typed_data();
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.q_type = TypeOf(q.element_type()), p.kv_type = TypeOf(kv_pages.element_type());
  p.tokens = tokens[0], p.heads = tokens[1], p.dim = tokens[2];
  p.pages = pages[1], p.kv_heads = pages[2] / 2, p.page_size = pages[3], p.group = p.heads / p.kv_heads;
  p.rows = table[0], p.width = table[1];
  p.scale = scale, p.soft_cap = soft_cap, p.window = window;
  const int64_t at = *layer.typed_data();
  if (at < 0 || at >= pages[0]) return ffi::Error::InvalidArgument("paged_attention: no layer " + std::to_string(at));
  const int64_t item = ItemBytes(p.kv_type);
  p.kv = static_cast<const char*>(kv_pages.untyped_data()) + at * p.pages * pages[2] * p.page_size * p.dim * item;

  const int64_t live = std::clamp<int64_t>(*num_seqs.typed_data(), 0, p.rows);
  const int32_t* cu = cu_q_lens.typed_data();
  std::vector<Tile> tiles;
  if (std::string wrong = Cut(p, kv_lens.typed_data(), cu, live, tiles); !wrong.empty()) {
    return ffi::Error::InvalidArgument("paged_attention: " + wrong);
  }
  const int64_t token_bytes = p.heads * p.dim * ItemBytes(p.q_type);
  const int64_t first = live ? cu[0] : 0, last = live ? cu[live] : 0;
  memset(p.out, 0, first * token_bytes);
  memset(static_cast<char*>(p.out) + last * token_bytes, 0, (p.tokens - last) * token_bytes);
  Call(p, tiles, KernelsFor(Choose(isa)), pool.num_threads()).Run(pool);
  if (const int64_t page = p.bad_page; page >= 0) {
    return ffi::Error::InvalidArgument("paged_attention: page " + std::to_string(page) + " is outside the cache of " +
                                       std::to_string(p.pages));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pallas_kernels

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_kernels_paged_attention, pallas_kernels::PagedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()                // q
                                  .Arg<xla::ffi::AnyBuffer>()                // kv_pages
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // layer
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // page_table
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // kv_lens
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // cu_q_lens
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // num_seqs
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()    // sinks, [0] for none
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<std::string_view>("isa"));
