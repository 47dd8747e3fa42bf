// Attention of a tile of queries over one segment of a row's keys, for one instruction set.
//
// cpu.cc includes this file once for each instruction set, inside a namespace of its own, with ISA_TARGET (attributes
// of every function), ISA_LANES (floats in a vector) and ISA_ROWS (query rows whose sums fit the registers).
// No include guard for that reason, and no lambdas: they would not inherit the target.

#include "pallas_kernels/paged_attention/cpu_vector.h"

constexpr int kRows = ISA_ROWS;

// scores[r * kBlock + j] = q[r] . keys[j] for R rows of q and `count` keys, rounded up to fours. Where `next` is not
// null it is a piece to ask for meanwhile, line by line: the core would wait for many at once.
template <int R, class T>
ISA_FUNCTION void Scores(const float* q, const T* keys, int count, int64_t dim, const T* next, float* scores) {
  for (int j = 0; j < count; j += 4) {
    const T* key = keys + j * dim;
    V sums[R][4] = {};
    for (int64_t h = 0; h < dim; h += kLanes) {
      if (next) Prefetch(next + j * dim + 4 * h, 4 * kLanes * sizeof(T));
      V x[R];
      UNROLL for (int r = 0; r < R; ++r) x[r] = Load(q + r * dim + h);
      UNROLL for (int c = 0; c < 4; ++c) {
        V y = Load(key + c * dim + h);
        UNROLL for (int r = 0; r < R; ++r) sums[r][c] += x[r] * y;
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      *reinterpret_cast<V4*>(scores + r * kBlock + j) = FoldLanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
}

// Adds weights[r * kBlock + j] * values[j] of the first `pieces` to sums[r], C vectors of the head's numbers.
template <int R, int C, class T>
ISA_FUNCTION void AddColumns(const float* weights, const Run<T>& values, int pieces, int64_t dim, int64_t column,
                             float* sums) {
  V a[R][C];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) a[r][c] = Load(sums + r * dim + column + c * kLanes);
  }
  for (int piece = 0; piece < pieces; ++piece) {
    const T* value = values.data[piece] + values.from[piece] * dim + column;
    for (int j = values.from[piece]; j < values.to[piece]; ++j, value += dim) {
      if (values.next[piece]) Prefetch(values.next[piece] + kPiece * column + j * C * kLanes, C * kLanes * sizeof(T));
      V x[R];
      UNROLL for (int r = 0; r < R; ++r) x[r] = Splat(weights[r * kBlock + piece * kPiece + j]);
      UNROLL for (int c = 0; c < C; ++c) {
        const V y = Load(value + c * kLanes);
        UNROLL for (int r = 0; r < R; ++r) a[r][c] += x[r] * y;
        UNROLL for (int r = 0; r < R; ++r) KEEP_ORDER(a[r][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) Store(sums + r * dim + column + c * kLanes, a[r][c]);
  }
}

template <int R, class T>
ISA_INLINE void AddValues(const float* weights, const Run<T>& values, int pieces, int64_t dim, float* sums) {
  for (int64_t h = 0; h < dim;) {
    const int columns = dim - h >= 4 * kLanes ? 4 : dim - h >= 2 * kLanes ? 2 : 1;
    if (columns == 4) AddColumns<R, 4>(weights, values, pieces, dim, h, sums);
    if (columns == 2) AddColumns<R, 2>(weights, values, pieces, dim, h, sums);
    if (columns == 1) AddColumns<R, 1>(weights, values, pieces, dim, h, sums);
    h += columns * kLanes;
  }
}

// How many of `left` rows to take at once: all that fit, or half where only a few would be left over.
ISA_INLINE int RowsAtOnce(int left) { return left <= kRows ? left : left < 2 * kRows ? (left + 1) / 2 : kRows; }

#define FOR_ROWS(rows, ...)                                                \
  for (int m = 0; m < (rows);) {                                           \
    const int taken = RowsAtOnce((rows) - m);                              \
    switch (taken) {                                                       \
      case 1: { constexpr int R = 1; __VA_ARGS__; } break;                 \
      case 2: { constexpr int R = 2; __VA_ARGS__; } break;                 \
      case 3: { constexpr int R = 3; __VA_ARGS__; } break;                 \
      case 4: { constexpr int R = kRows > 3 ? 4 : 1; __VA_ARGS__; } break; \
      case 5: { constexpr int R = kRows > 4 ? 5 : 1; __VA_ARGS__; } break; \
      default: { constexpr int R = kRows > 5 ? 6 : 1; __VA_ARGS__; }       \
    }                                                                      \
    m += taken;                                                            \
  }

constexpr int kAtOnce = 4;  // vectors of scores
constexpr int kStep = kAtOnce * kLanes;
static_assert(kBlock % kStep == 0, "whole steps stay in a row of scores");

// The largest of a query's scores s[lo, hi), lane by lane. What it does not see, up to whole steps, becomes -infinity.
ISA_INLINE V Largest(float* s, int lo, int hi, float cap) {
  const int first = lo / kStep * kStep, last = (hi + kStep - 1) / kStep * kStep;
  if (cap > 0.0f) {
    for (int j = first; j < last; j += kLanes) Store(s + j, SoftCap(Load(s + j), cap));
  }
  std::fill(s + first, s + lo, -INFINITY);
  std::fill(s + hi, s + last, -INFINITY);
  V top = Splat(-INFINITY);
  for (int j = first; j < last; j += kLanes) top = Both<true>(Load(s + j), top);
  return top;
}

// Scores s[0, count) of a query that sees [lo, hi) become weights e^(s - high), 0 where unseen. Returns their sums.
ISA_INLINE V Weigh(float* s, int lo, int hi, int count, float high) {
  const int first = lo / kStep * kStep, last = (hi + kStep - 1) / kStep * kStep;
  std::fill(s, s + first, 0.0f);
  V sum = {};
  for (int j = first; j < last; j += kStep) {
    V x[kAtOnce];
    UNROLL for (int i = 0; i < kAtOnce; ++i) x[i] = Load(s + j + i * kLanes) - high;
    Exponentials(x);
    UNROLL for (int i = 0; i < kAtOnce; ++i) {
      Store(s + j + i * kLanes, x[i]);
      sum += x[i];
    }
  }
  if (last < count) std::fill(s + last, s + count, 0.0f);
  return sum;
}

ISA_FUNCTION void Scale(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += kLanes) Store(x + i, Load(x + i) * factor);
}

// count numbers of `type` as floats.
ISA_FUNCTION void Widen(const void* from, Type type, int64_t count, float* to) {
  switch (type) {
    case Type::kF32:
      memcpy(to, from, count * sizeof(float));
      break;
    case Type::kBF16:
      for (int64_t i = 0; i < count; i += kLanes) Store(to + i, Load(static_cast<const uint16_t*>(from) + i));
      break;
    case Type::kS8:
      for (int64_t i = 0; i < count; i += kLanes) Store(to + i, Load(static_cast<const int8_t*>(from) + i));
      break;
    case Type::kF8:
      for (int64_t i = 0; i < count; i += kLanes) Store(to + i, Load(static_cast<const Float8*>(from) + i));
      break;
  }
}

// The keys (half 0) or values of one head in [key, key + kRun) that lie in `keys`, and as many pieces to ask for.
template <class T>
ISA_FUNCTION Run<T> Fetch(const Problem& p, const Tile& tile, int64_t head, int half, int64_t key, Range keys,
                          Prefetcher& ahead, float* staged) {
  Run<T> run{};
  const bool in_place = p.WholePieces() && p.kv_type == TypeOf<T>();
  run.pieces = static_cast<int>(std::min<int64_t>((keys.end - key + kPiece - 1) / kPiece, kPieces));
  for (int piece = 0; piece < run.pieces; ++piece) {
    const int64_t start = key + piece * kPiece;
    run.from[piece] = static_cast<int>(std::clamp<int64_t>(keys.begin - start, 0, kPiece));
    run.to[piece] = static_cast<int>(std::clamp<int64_t>(keys.end - start, 0, kPiece));
    if (run.from[piece] >= run.to[piece]) continue;
    const void* next = ahead.Next();
    if (in_place) {
      run.data[piece] = static_cast<const T*>(p.Find(tile, head, half, start));
      run.next[piece] = static_cast<const T*>(next);
      continue;
    }
    if (next) Prefetch(next, kPiece * p.dim * ItemBytes(p.kv_type));
    if constexpr (std::is_same<T, float>::value) run.data[piece] = staged + piece * kPiece * p.dim;
    for (int64_t at = start + run.from[piece]; at < start + run.to[piece];) {
      const int64_t count = std::min(start + run.to[piece] - at, p.page_size - at % p.page_size);
      Widen(p.Find(tile, head, half, at), p.kv_type, count * p.dim, staged + (at - key) * p.dim);
      at += count;
    }
  }
  return run;
}

// The scores of one head's queries in one block become weights, and their softmax goes on; `state` is of these queries.
// Four at a time, step by step: one query's chains of operations run beside another's.
ISA_FUNCTION void WeighBlock(const Problem& p, const Tile& tile, int64_t block, Range now, float* scores,
                             const Softmax& state) {
  const int rows = static_cast<int>(tile.tokens * p.group), count = static_cast<int>((now.end - block + 15) / 16 * 16);
  for (int m = 0; m < rows; m += 4) {
    const int taken = std::min(rows - m, 4);
    int lo[4], hi[4];
    V lanes[4];
    for (int r = 0; r < 4; ++r) {
      lanes[r] = Splat(-INFINITY);
      if (r >= taken) continue;
      const int64_t position = tile.position + (m + r) / p.group;
      lo[r] = static_cast<int>(std::max(std::max(now.begin, p.FirstKey(position)) - block, int64_t{0}));
      hi[r] = std::max(static_cast<int>(std::min(now.end, position + 1) - block), lo[r]);
      if (lo[r] == hi[r]) lo[r] = hi[r] = 0;
      lanes[r] = Largest(scores + (m + r) * kBlock, lo[r], hi[r], p.soft_cap);
    }
    const V4 tops = FoldLanes<true>(lanes[0], lanes[1], lanes[2], lanes[3]);
    float high[4];
    for (int r = 0; r < taken; ++r) {
      high[r] = std::max(state.largest[m + r], tops[r]);
      lanes[r] = Weigh(scores + (m + r) * kBlock, lo[r], hi[r], count, high[r]);
    }
    const V4 added = FoldLanes(lanes[0], lanes[1], lanes[2], lanes[3]);
    for (int r = 0; r < taken; ++r) {
      if (high[r] != state.largest[m + r]) {
        const float decay = Exponential(state.largest[m + r] - high[r]);
        Scale(state.sums + (m + r) * p.dim, p.dim, decay);
        state.total[m + r] *= decay;
        state.largest[m + r] = high[r];
      }
      state.total[m + r] += added[r];
    }
  }
}

// The softmax of the tile's queries over some keys of one segment, begun afresh in `w.part`. Pieces are read as T where
// they lie, or widened first (float only).
template <class T>
ISA_FUNCTION void SegmentAs(const Problem& p, const Tile& tile, Range keys, const Ahead& after, const Scratch& w) {
  const int each = static_cast<int>(tile.tokens * p.group);
  const int64_t dim = p.dim;
  w.part.Clear(p.Rows(tile), dim);
  Prefetcher ahead(p, Ahead{&tile, keys}, after);
  for (int64_t block = keys.begin / kBlock * kBlock; block < keys.end; block += kBlock) {
    const Range now{std::max(keys.begin, block), std::min(keys.end, block + kBlock)};
    for (int head = 0; head < tile.heads; ++head) {
      const float* q = w.q + head * each * dim;
      const Softmax state = w.part.From(head * each, dim);
      for (int64_t key = now.begin / kRun * kRun; key < now.end; key += kRun) {
        Run<T> run = Fetch<T>(p, tile, tile.head + head, 0, key, now, ahead, w.staged);
        for (int piece = 0; piece < run.pieces; ++piece) {
          if (run.from[piece] >= run.to[piece]) continue;
          float* scores = w.scores + (key - block) + piece * kPiece;
          FOR_ROWS(each, {
            if (p.Pieces(tile, m + R - 1, key) > piece) {
              Scores<R>(q + m * dim, run.data[piece], run.to[piece], dim, run.next[piece], scores + m * kBlock);
              run.next[piece] = nullptr;
            }
          })
        }
      }
      WeighBlock(p, tile, block, now, w.scores, state);
      for (int64_t key = now.begin / kRun * kRun; key < now.end; key += kRun) {
        Run<T> run = Fetch<T>(p, tile, tile.head + head, 1, key, now, ahead, w.staged);
        FOR_ROWS(each, {
          const int pieces = std::min(p.Pieces(tile, m + R - 1, key), run.pieces);
          AddValues<R>(w.scores + m * kBlock + (key - block), run, pieces, dim, state.sums + m * dim);
          run.Asked(pieces);
        })
      }
    }
  }
}

ISA_FUNCTION void Segment(const Problem& p, const Tile& tile, Range keys, const Ahead& after, const Scratch& w) {
  const bool widen = tile.tokens * p.group > kFewRows || !p.WholePieces();
  if (!widen && p.kv_type == Type::kBF16) return SegmentAs<uint16_t>(p, tile, keys, after, w);
  if (!widen && p.kv_type == Type::kS8) return SegmentAs<int8_t>(p, tile, keys, after, w);
  if (!widen && p.kv_type == Type::kF8) return SegmentAs<Float8>(p, tile, keys, after, w);
  SegmentAs<float>(p, tile, keys, after, w);
}

// Folds the softmax of later keys into that of earlier ones.
ISA_FUNCTION void Join(const Softmax& into, const Softmax& part, int rows, int64_t dim) {
  for (int m = 0; m < rows; ++m) {
    const float high = std::max(into.largest[m], part.largest[m]);
    const float old = Exponential(into.largest[m] - high), now = Exponential(part.largest[m] - high);
    into.largest[m] = high;
    into.total[m] = into.total[m] * old + part.total[m] * now;
    for (int64_t h = m * dim; h < (m + 1) * dim; h += kLanes) {
      Store(into.sums + h, Load(into.sums + h) * old + Load(part.sums + h) * now);
    }
  }
}

ISA_FUNCTION void LoadQueries(const Problem& p, const Tile& tile, float* q) {
  const int64_t numbers = p.group * p.dim;
  for (int64_t head = 0; head < tile.heads; ++head) {
    for (int64_t t = 0; t < tile.tokens; ++t) {
      const int64_t at = ((tile.token + t) * p.heads + (tile.head + head) * p.group) * p.dim;
      const char* from = static_cast<const char*>(p.q) + at * ItemBytes(p.q_type);
      Widen(from, p.q_type, numbers, q + (head * tile.tokens + t) * numbers);
    }
  }
  Scale(q, p.Rows(tile) * p.dim, p.scale);
}

#undef FOR_ROWS
#undef UNROLL
#undef KEEP_ORDER
#undef ISA_FUNCTION
#undef ISA_INLINE
