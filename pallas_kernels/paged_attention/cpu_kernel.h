// Attention of a tile of queries over one segment of a row's keys, for one instruction set.
//
// cpu.cc includes this file once for each instruction set, inside a namespace of its own, with ISA_TARGET (attributes
// of every function), ISA_LANES (floats in a vector) and ISA_ROWS (query rows whose sums fit the registers).
// No include guard for that reason, and no lambdas: they would not inherit the target.

constexpr int kLanes = ISA_LANES;
constexpr int kRows = ISA_ROWS;

typedef float V __attribute__((vector_size(4 * ISA_LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * ISA_LANES), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(2 * ISA_LANES), aligned(2), may_alias));
typedef int8_t Byte __attribute__((vector_size(ISA_LANES), aligned(1), may_alias));
typedef float V4 __attribute__((vector_size(16), aligned(4), may_alias));

#define ISA_INLINE static inline __attribute__((always_inline)) ISA_TARGET
#define ISA_FUNCTION static __attribute__((noinline)) ISA_TARGET
#define UNROLL _Pragma("GCC unroll 8")

ISA_INLINE V Load(const float* p) { return *reinterpret_cast<const V*>(p); }
ISA_INLINE void Store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }
ISA_INLINE V Splat(float x) { return x - V{}; }

// e^x for x <= 0, within 2 units of the last place; exactly 0 below -87 and NaN for NaN.
ISA_INLINE V Exp(V x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  V t = x * 1.44269504f + shift;
  V n = t - shift;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = 1.98756915e-4f * r + 1.39819995e-3f;
  p = p * r + 8.33345191e-3f;
  p = p * r + 4.16657959e-2f;
  p = p * r + 1.66666655e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * (r * r) + r + 1.0f;
  I exponent = (reinterpret_cast<I>(t) - 0x4B400000 + 127) << 23;
  V y = p * reinterpret_cast<V>(exponent);
  return reinterpret_cast<V>(reinterpret_cast<I>(y) & ~(x < -87.0f));
}

ISA_INLINE float ExpOne(float x) { return Exp(Splat(x))[0]; }

// cap * tanh(x / cap)
ISA_INLINE V SoftCap(V x, float cap) {
  V y = x / cap;
  V e = Exp(y < 0.0f ? y * 2.0f : y * -2.0f);
  V t = cap * (1.0f - e) / (1.0f + e);
  return y < 0.0f ? -t : t;
}

// The four sums of the lanes of a, b, c and d, always added in the same order.
ISA_INLINE V4 SumLanes(V a, V b, V c, V d) {
#if ISA_LANES == 16
  typedef float V8 __attribute__((vector_size(32), aligned(4), may_alias));
  V8 wide[4];
  const V in[4] = {a, b, c, d};
  UNROLL for (int i = 0; i < 4; ++i) {
    V8 parts[2];
    memcpy(parts, &in[i], sizeof(V));
    wide[i] = parts[0] + parts[1];
  }
  V8 x = wide[0], y = wide[1], z = wide[2], w = wide[3];
#else
  V x = a, y = b, z = c, w = d;
#endif
#if ISA_LANES >= 8
  auto xy = SHUFFLE8(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  auto zw = SHUFFLE8(z, w, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(z, w, 2, 10, 3, 11, 6, 14, 7, 15);
  auto all = SHUFFLE8(xy, zw, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE8(xy, zw, 2, 3, 10, 11, 6, 7, 14, 15);
  V4 halves[2];
  memcpy(halves, &all, sizeof(all));
  return halves[0] + halves[1];
#else
  auto xy = SHUFFLE4(x, y, 0, 4, 1, 5) + SHUFFLE4(x, y, 2, 6, 3, 7);
  auto zw = SHUFFLE4(z, w, 0, 4, 1, 5) + SHUFFLE4(z, w, 2, 6, 3, 7);
  return SHUFFLE4(xy, zw, 0, 1, 4, 5) + SHUFFLE4(xy, zw, 2, 3, 6, 7);
#endif
}

// scores[r * kBlock + j] = q[r] . keys[j] for R rows of q and `count` keys, rounded up to fours. Where `next` is not
// null it is the piece to ask for meanwhile, `next_bytes` a key: a few lines at a time, or the core waits for them.
template <int R>
ISA_FUNCTION void Scores(const float* q, const float* keys, int count, int64_t dim, const char* next,
                         int64_t next_bytes, float* scores) {
  for (int j = 0; j < count; j += 4) {
    if (next) Prefetch(next + j * next_bytes, 4 * next_bytes);
    const float* key = keys + j * dim;
    V sums[R][4] = {};
    for (int64_t h = 0; h < dim; h += kLanes) {
      V x[R];
      UNROLL for (int r = 0; r < R; ++r) x[r] = Load(q + r * dim + h);
      UNROLL for (int c = 0; c < 4; ++c) {
        V y = Load(key + c * dim + h);
        UNROLL for (int r = 0; r < R; ++r) sums[r][c] += x[r] * y;
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      *reinterpret_cast<V4*>(scores + r * kBlock + j) = SumLanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
}

// Pieces to ask for while a run is worked on.
struct NextRun {
  const char* data[kPieces];  // null: none
  int64_t bytes;              // of one number
};

// Adds weights[r * kBlock + j] * values[j] to sums[r] for j in [from, to), C vectors of the head's numbers.
template <int R, int C>
ISA_FUNCTION void AddColumns(const float* weights, const Run& values, int64_t dim, int64_t column, const NextRun& next,
                             float* sums) {
  V a[R][C];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) a[r][c] = Load(sums + r * dim + column + c * kLanes);
  }
  for (int piece = 0; piece < kPieces; ++piece) {
    const float* value = values.data[piece] + values.from[piece] * dim + column;
    for (int j = values.from[piece]; j < values.to[piece]; ++j, value += dim) {
      if (next.data[piece]) Prefetch(next.data[piece] + (j * dim + column) * next.bytes, C * kLanes * next.bytes);
      V y[C];
      UNROLL for (int c = 0; c < C; ++c) y[c] = Load(value + c * kLanes);
      UNROLL for (int r = 0; r < R; ++r) {
        V x = Splat(weights[r * kBlock + piece * kPiece + j]);
        UNROLL for (int c = 0; c < C; ++c) a[r][c] += x * y[c];
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) Store(sums + r * dim + column + c * kLanes, a[r][c]);
  }
}

template <int R>
ISA_INLINE void AddValues(const float* weights, const Run& values, int64_t dim, const NextRun& next, float* sums) {
  for (int64_t h = 0; h < dim;) {
    const int columns = dim - h >= 4 * kLanes ? 4 : dim - h >= 2 * kLanes ? 2 : 1;
    if (columns == 4) AddColumns<R, 4>(weights, values, dim, h, next, sums);
    if (columns == 2) AddColumns<R, 2>(weights, values, dim, h, next, sums);
    if (columns == 1) AddColumns<R, 1>(weights, values, dim, h, next, sums);
    h += columns * kLanes;
  }
}

// How many of `left` rows to take at once: all that fit, or half where only a few would be left over.
ISA_INLINE int RowsAtOnce(int left) { return left <= kRows ? left : left < 2 * kRows ? (left + 1) / 2 : kRows; }

#define FOR_ROWS(rows, CALL)                                    \
  for (int m = 0; m < (rows);) {                                \
    const int taken = RowsAtOnce((rows) - m);                   \
    switch (taken) {                                            \
      case 1: { constexpr int R = 1; CALL; } break;             \
      case 2: { constexpr int R = 2; CALL; } break;             \
      case 3: { constexpr int R = 3; CALL; } break;             \
      case 4: { constexpr int R = kRows > 3 ? 4 : 1; CALL; } break; \
      case 5: { constexpr int R = kRows > 4 ? 5 : 1; CALL; } break; \
      default: { constexpr int R = kRows > 5 ? 6 : 1; CALL; }   \
    }                                                           \
    m += taken;                                                 \
  }

// Scores s[0, count) of one query, of which it sees [lo, hi), become weights e^(s - largest), 0 where unseen.
// Returns what earlier weights must be multiplied by. count is a multiple of 16.
ISA_FUNCTION float Weigh(float* s, int lo, int hi, int count, float cap, float* largest, float* total) {
  if (lo >= hi) {
    std::fill(s, s + count, 0.0f);
    return 1.0f;
  }
  if (cap > 0.0f) {
    for (int j = 0; j < count; j += kLanes) Store(s + j, SoftCap(Load(s + j), cap));
  }
  std::fill(s, s + lo, -INFINITY);
  std::fill(s + hi, s + count, -INFINITY);
  V top = Load(s);
  for (int j = kLanes; j < count; j += kLanes) {
    V x = Load(s + j);
    top = x > top ? x : top;
  }
  float high = *largest;
  for (int lane = 0; lane < kLanes; ++lane) high = std::max(high, top[lane]);
  V sum = {};
  for (int j = 0; j < count; j += kLanes) {
    V weight = Exp(Load(s + j) - high);
    Store(s + j, weight);
    sum += weight;
  }
  float added = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) added += sum[lane];
  const float decay = *largest == high ? 1.0f : ExpOne(*largest - high);
  *largest = high;
  *total = *total * decay + added;
  return decay;
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
      for (int64_t i = 0; i < count; i += kLanes) {
        Half bits = *reinterpret_cast<const Half*>(static_cast<const uint16_t*>(from) + i);
        Store(to + i, reinterpret_cast<V>(__builtin_convertvector(bits, I) << 16));
      }
      break;
    case Type::kS8:
      for (int64_t i = 0; i < count; i += kLanes) {
        Byte bytes = *reinterpret_cast<const Byte*>(static_cast<const int8_t*>(from) + i);
        Store(to + i, __builtin_convertvector(__builtin_convertvector(bytes, I), V));
      }
      break;
    case Type::kF8:
      for (int64_t i = 0; i < count; ++i) to[i] = kFloat8.value[static_cast<const uint8_t*>(from)[i]];
      break;
  }
}

// The keys (half 0) or values of one head in [key, key + kRun) that lie in `keys`.
ISA_FUNCTION Run Fetch(const Problem& p, const Tile& tile, int64_t head, int half, int64_t key, Range keys,
                       float* staged) {
  Run run;
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t start = key + piece * kPiece;
    run.from[piece] = static_cast<int>(std::clamp<int64_t>(keys.begin - start, 0, kPiece));
    run.to[piece] = static_cast<int>(std::clamp<int64_t>(keys.end - start, 0, kPiece));
    run.data[piece] = staged + piece * kPiece * p.dim;
    if (run.from[piece] >= run.to[piece]) continue;
    if (p.in_place) {
      run.data[piece] = static_cast<const float*>(p.Find(tile, head, half, start));
      continue;
    }
    for (int64_t at = start + run.from[piece]; at < start + run.to[piece];) {
      const int64_t count = std::min(start + run.to[piece] - at, p.page_size - at % p.page_size);
      Widen(p.Find(tile, head, half, at), p.kv_type, count * p.dim, staged + (at - key) * p.dim);
      at += count;
    }
  }
  return run;
}

// The softmax of the tile's queries over some keys of one segment, begun afresh in `w.part`.
ISA_FUNCTION void Segment(const Problem& p, const Tile& tile, Range keys, const Ahead& after, const Scratch& w) {
  const int rows = static_cast<int>(p.Rows(tile)), each = rows / static_cast<int>(tile.heads);
  const int64_t dim = p.dim, item = ItemBytes(p.kv_type);
  std::fill(w.part.largest, w.part.largest + rows, kFloor);
  std::fill(w.part.total, w.part.total + rows, 0.0f);
  std::fill(w.part.sums, w.part.sums + rows * dim, 0.0f);
  for (int64_t block = keys.begin / kBlock * kBlock; block < keys.end; block += kBlock) {
    const Range now{std::max(keys.begin, block), std::min(keys.end, block + kBlock)};
    Prefetcher ahead(p, now.end < keys.end ? Ahead{&tile, {now.end, keys.end}} : after);
    for (int64_t key = now.begin / kRun * kRun; key < now.end; key += kRun) {
      for (int head = 0; head < tile.heads; ++head) {
        const NextRun next{{ahead.Next(), ahead.Next()}, item};
        const Run run = Fetch(p, tile, tile.head + head, 0, key, now, w.staged);
        for (int piece = 0; piece < kPieces; ++piece) {
          if (run.from[piece] >= run.to[piece]) continue;
          const float* q = w.q + head * each * dim;
          float* scores = w.scores + head * each * kBlock + (key - block) + piece * kPiece;
          FOR_ROWS(each, (Scores<R>(q + m * dim, run.data[piece], run.to[piece], dim, m ? nullptr : next.data[piece],
                                    dim * item, scores + m * kBlock)))
        }
      }
    }
    const int count = static_cast<int>((now.end - block + 15) / 16 * 16);
    for (int m = 0; m < rows; ++m) {
      const int64_t position = tile.position + m % each / p.group;
      const int lo = static_cast<int>(std::max(std::max(now.begin, p.FirstKey(position)) - block, int64_t{0}));
      const int hi = static_cast<int>(std::min(now.end, position + 1) - block);
      const float decay = Weigh(w.scores + m * kBlock, lo, hi, count, p.soft_cap, &w.part.largest[m], &w.part.total[m]);
      if (decay != 1.0f) Scale(w.part.sums + m * dim, dim, decay);
    }
    for (int64_t key = now.begin / kRun * kRun; key < now.end; key += kRun) {
      for (int head = 0; head < tile.heads; ++head) {
        const NextRun next{{ahead.Next(), ahead.Next()}, item};
        const Run run = Fetch(p, tile, tile.head + head, 1, key, now, w.staged);
        const float* weights = w.scores + head * each * kBlock + (key - block);
        float* sums = w.part.sums + head * each * dim;
        FOR_ROWS(each, (AddValues<R>(weights + m * kBlock, run, dim, m ? NextRun{} : next, sums + m * dim)))
      }
    }
  }
}

// Folds the softmax of later keys into that of earlier ones.
ISA_FUNCTION void Join(const Softmax& into, const Softmax& part, int rows, int64_t dim) {
  for (int m = 0; m < rows; ++m) {
    const float high = std::max(into.largest[m], part.largest[m]);
    const float old = ExpOne(into.largest[m] - high), now = ExpOne(part.largest[m] - high);
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
#undef ISA_FUNCTION
#undef ISA_INLINE
