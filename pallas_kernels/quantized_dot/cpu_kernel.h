// The inner loops for one instruction set. cpu.cc includes this file once for each, inside a namespace that defines
// LANES (floats in a Vector, numbers in an Int), TILE_ROWS (rows of x that a register tile holds), `half` and `bytes`
// (float16 and 8-bit numbers from memory, widened), `fma`, and ISA_TARGET, what a function needs to use them. No lambdas:
// they would not inherit it.
//
// A vector's lanes are outputs; a sum over `in` runs in one lane, in the order 0, 16, 1, 17, ... of every block. Both
// ways of walking keep that order, so a row's result never depends on how many rows there are.

constexpr long kVectors = kGroup / LANES;  // vectors of one group of outputs
constexpr long kTileBlocks = 8;            // blocks widened at a time: 16 KiB for a group
constexpr long kTileGroups = 4;            // groups that share one pass over x
constexpr long kFusedRows = 8;             // up to here weights are widened in registers, beyond it into a tile

template <class T>
ISA_TARGET static inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

ISA_TARGET static inline Vector splat(float x) { return x - Vector{}; }

// A block of 32 weights of LANES outputs.
struct Block {
  const uint8_t* codes;
  Vector scale, min;
};

template <Format F>
ISA_TARGET static inline Block block(const Job& job, long vector, long index) {
  const long group = vector / kVectors, lane = vector % kVectors * LANES;
  const long place = group * job.blocks() + index;
  Block b{job.codes + place * kGroup * code_bytes(F) + lane, {}, {}};
  if constexpr (F == Format::kInt8) {
    b.scale = load<Vector>(static_cast<const float*>(job.scales) + group * kGroup + lane);
  } else {
    b.scale = half(static_cast<const uint16_t*>(job.scales) + place * kGroup + lane);
  }
  if constexpr (F == Format::kQ4_0) b.min = b.scale * -8.0f;
  if constexpr (F == Format::kQ4_1) b.min = half(job.mins + place * kGroup + lane);
  return b;
}

// Weights `index` and `index + 16` of a block, exactly as the file means them.
template <Format F>
ISA_TARGET static inline void widen(const Block& b, long index, Vector& low, Vector& high) {
  const uint8_t* codes = b.codes + index * kGroup;
  if constexpr (code_bytes(F) == kBlock) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(codes);
    low = b.scale * __builtin_convertvector(bytes(numbers), Vector);
    high = b.scale * __builtin_convertvector(bytes(numbers + 16 * kGroup), Vector);
  } else {
    const Int pair = bytes(codes);
    low = fma(__builtin_convertvector(pair & 15, Vector), b.scale, b.min);
    high = fma(__builtin_convertvector(pair >> 4, Vector), b.scale, b.min);
  }
}

ISA_TARGET static inline void store(const Job& job, long row, long vector, Vector value) {
  const long column = vector * LANES, left = std::min<long>(job.out - column, LANES);
  if (left > 0) std::memcpy(job.y + row * job.out + column, &value, sizeof(float) * left);
}

// All R rows of x times V vectors of outputs, weights widened in registers.
template <Format F, int R, int V>
ISA_TARGET static void fused(const Job& job, long first) {
  Vector sums[R][V] = {};
  for (long i = 0; i < job.blocks(); ++i) {
    Block blocks[V];
    for (int v = 0; v < V; ++v) blocks[v] = block<F>(job, first + v, i);
    const float* x = job.x + i * kBlock;
    for (long k = 0; k < 16; ++k) {
      for (int v = 0; v < V; ++v) {
        Vector low, high;
        widen<F>(blocks[v], k, low, high);
        for (int r = 0; r < R; ++r) {
          sums[r][v] = fma(low, splat(x[r * job.in + k]), sums[r][v]);
          sums[r][v] = fma(high, splat(x[r * job.in + k + 16]), sums[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(job, r, first + v, sums[r][v]);
}

template <Format F, int R = kFusedRows>
ISA_TARGET static void fused_rows(const Job& job, long first, long last) {
  if constexpr (R > 1) {
    if (job.rows < R) return fused_rows<F, R - 1>(job, first, last);
  }
  constexpr int kWide = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // about eight sums on their way hide the latency of fma
  long vector = first * kVectors;
  for (; vector + kWide <= last * kVectors; vector += kWide) fused<F, R, kWide>(job, vector);
  for (; vector < last * kVectors; ++vector) fused<F, R, 1>(job, vector);
}

// R rows of x times one widened tile, added to sums[R][kGroup].
template <int R>
ISA_TARGET static void multiply(const float* tile, long blocks, const float* x, long in, float* sums) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load<Vector>(sums + r * kGroup + v * LANES);
  for (long i = 0; i < blocks; ++i, x += kBlock) {
    for (long k = 0; k < 16; ++k) {
      for (long half_block = 0; half_block < 32; half_block += 16, tile += kGroup) {
        Vector w[kVectors];
        for (int v = 0; v < kVectors; ++v) w[v] = load<Vector>(tile + v * LANES);
        for (int r = 0; r < R; ++r) {
          const Vector each = splat(x[r * in + k + half_block]);
          for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(w[v], each, sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) std::memcpy(sums + r * kGroup, sum[r], sizeof sum[r]);
}

template <int R = TILE_ROWS>
ISA_TARGET static void multiply_rows(long rows, const float* tile, long blocks, const float* x, long in, float* sums) {
  for (; rows >= R; rows -= R, x += R * in, sums += R * kGroup) multiply<R>(tile, blocks, x, in, sums);
  if constexpr (R > 1) {
    if (rows) multiply_rows<R - 1>(rows, tile, blocks, x, in, sums);
  }
}

// Up to kTileGroups groups: each piece of `in` is widened once and used by all rows.
template <Format F>
ISA_TARGET static void tiled(const Job& job, long first, long count) {
  constexpr long kTile = kTileBlocks * kBlock * kGroup;
  const std::unique_ptr<float[]> tiles(new float[kTileGroups * kTile]);
  const std::unique_ptr<float[]> sums(new float[count * job.rows * kGroup]());
  for (long start = 0; start < job.blocks(); start += kTileBlocks) {
    const long blocks = std::min(kTileBlocks, job.blocks() - start);
    for (long g = 0; g < count; ++g) {
      for (long i = 0; i < blocks; ++i) {
        for (long v = 0; v < kVectors; ++v) {
          const Block b = block<F>(job, (first + g) * kVectors + v, start + i);
          float* to = &tiles[g * kTile] + i * kBlock * kGroup + v * LANES;
          for (long k = 0; k < 16; ++k, to += 2 * kGroup) {
            Vector low, high;
            widen<F>(b, k, low, high);
            std::memcpy(to, &low, sizeof low);
            std::memcpy(to + kGroup, &high, sizeof high);
          }
        }
      }
    }
    for (long row = 0; row < job.rows; row += TILE_ROWS) {
      const long rows = std::min<long>(TILE_ROWS, job.rows - row);
      for (long g = 0; g < count; ++g) {
        const float* x = job.x + row * job.in + start * kBlock;
        multiply_rows(rows, &tiles[g * kTile], blocks, x, job.in, &sums[(g * job.rows + row) * kGroup]);
      }
    }
  }
  for (long row = 0; row < job.rows; ++row)
    for (long g = 0; g < count; ++g)
      for (long v = 0; v < kVectors; ++v)
        store(job, row, (first + g) * kVectors + v, load<Vector>(&sums[(g * job.rows + row) * kGroup + v * LANES]));
}

// Outputs of the groups first ... last - 1.
template <Format F>
ISA_TARGET static void groups(const Job& job, long first, long last) {
  if (job.rows <= kFusedRows) return fused_rows<F>(job, first, last);
  for (; first < last; first += kTileGroups) tiled<F>(job, first, std::min(kTileGroups, last - first));
}

ISA_TARGET static Kernel kernel(Format format) {
  switch (format) {
    case Format::kQ4_0: return groups<Format::kQ4_0>;
    case Format::kQ4_1: return groups<Format::kQ4_1>;
    case Format::kQ8_0: return groups<Format::kQ8_0>;
    default: return groups<Format::kInt8>;
  }
}
