// The inner loops for one instruction set. cpu.cc includes this file once for each, inside a namespace that defines
// LANES (floats in a Vector, numbers in an Int), TILE_ROWS (rows of x that a register tile holds), `half` and `bytes`
// (float16 and 8-bit numbers from memory, widened), `fma`, and ISA_TARGET, what a function needs to use them. No lambdas:
// they would not inherit it.
//
// A vector's lanes are outputs; a sum over `in` runs in one lane, in the order 0, 16, 1, 17, ... of every block. Both
// ways of walking keep that order, so a row's result never depends on how many rows there are.

#define UNROLL _Pragma("GCC unroll 8")

constexpr long kVectors = kGroup / LANES;  // vectors of one group of outputs
constexpr long kTileBlocks = 9;            // blocks widened at a time: 18 KiB, which stay in the first cache
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
  constexpr long kSide = code_bytes(F) == kBlock ? 1 : kQuad;  // bytes of one output that lie together
  Block b{job.codes + place * kGroup * code_bytes(F) + lane * kSide, {}, {}};
  if constexpr (F == Format::kInt8) {
    b.scale = load<Vector>(static_cast<const float*>(job.scales) + group * kGroup + lane);
  } else {
    b.scale = half(static_cast<const uint16_t*>(job.scales) + place * kGroup + lane);
  }
  if constexpr (F == Format::kQ4_0) b.min = b.scale * -8.0f;
  if constexpr (F == Format::kQ4_1) b.min = half(job.mins + place * kGroup + lane);
  return b;
}

// Weights `quad + i` and `quad + i + 16` of a block, exactly as the file means them; i counts to kQuad.
template <Format F>
ISA_TARGET static inline void widen(const Block& b, long quad, int i, Vector& low, Vector& high) {
  if constexpr (code_bytes(F) == kBlock) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(b.codes) + (quad + i) * kGroup;
    low = b.scale * __builtin_convertvector(bytes(numbers), Vector);
    high = b.scale * __builtin_convertvector(bytes(numbers + 16 * kGroup), Vector);
  } else {
    const Int words = load<Int>(b.codes + quad * kGroup), pairs = words >> i * 8;
    low = fma(__builtin_convertvector(pairs & 15, Vector), b.scale, b.min);
    high = fma(__builtin_convertvector(pairs >> 4 & 15, Vector), b.scale, b.min);
  }
}

ISA_TARGET static inline void store(const Job& job, long row, long vector, Vector value) {
  const long column = vector * LANES, left = job.out - column;
  float* const to = job.y + row * job.out + column;
  if (left >= LANES) {
    std::memcpy(to, &value, sizeof value);
  } else if (left > 0) {
    std::memcpy(to, &value, sizeof(float) * left);
  }
}

// All R rows of x times V vectors of outputs, weights widened in registers.
template <Format F, int R, int V>
ISA_TARGET static void fused(const Job& job, long first) {
  Vector sums[R][V] = {};
  for (long i = 0; i < job.blocks(); ++i) {
    Block blocks[V];
    for (int v = 0; v < V; ++v) blocks[v] = block<F>(job, first + v, i);
    const float* x = job.x + i * kBlock;
    for (long quad = 0; quad < 16; quad += kQuad) {
      UNROLL for (long k = quad; k < quad + kQuad; ++k) {
        Vector low[V], high[V];
        UNROLL for (int v = 0; v < V; ++v) widen<F>(blocks[v], quad, k - quad, low[v], high[v]);
        UNROLL for (int r = 0; r < R; ++r) {
          const Vector each = splat(x[r * job.in + k]);
          UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(low[v], each, sums[r][v]);
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const Vector each = splat(x[r * job.in + k + 16]);
          UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(high[v], each, sums[r][v]);
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
  constexpr int kWide = R <= 4 ? 2 : 1;  // more sums would not stay in sixteen registers
  long vector = first * kVectors;
  for (; vector + kWide <= last * kVectors; vector += kWide) fused<F, R, kWide>(job, vector);
  for (; vector < last * kVectors; ++vector) fused<F, R, 1>(job, vector);
}

// Blocks start ... start + blocks - 1 of a group as floats [32 * blocks, kGroup], in the order in which they are summed.
template <Format F>
ISA_TARGET static void widen_tile(const Job& job, long group, long start, long blocks, float* tile) {
  for (long i = 0; i < blocks; ++i) {
    Block b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = block<F>(job, group * kVectors + v, start + i);
    for (long quad = 0; quad < 16; quad += kQuad) {
      UNROLL for (int i = 0; i < kQuad; ++i, tile += 2 * kGroup) {
        UNROLL for (int v = 0; v < kVectors; ++v) {
          Vector low, high;
          widen<F>(b[v], quad, i, low, high);
          std::memcpy(tile + v * LANES, &low, sizeof low);
          std::memcpy(tile + kGroup + v * LANES, &high, sizeof high);
        }
      }
    }
  }
}

// Where rows of sums of one group are: `stride` floats apart.
struct Sums {
  float* first;
  long stride;
  float* at(long row, long vector) const { return first + row * stride + vector * LANES; }
};

// R rows of x times one tile, added to the sums of those rows, which begin at zero where `begins`.
template <int R>
ISA_TARGET static void multiply(const float* tile, long blocks, const float* x, long in, Sums sums, bool begins) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = begins ? Vector{} : load<Vector>(sums.at(r, v));
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
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) std::memcpy(sums.at(r, v), &sum[r][v], sizeof(Vector));
}

template <int R = TILE_ROWS>
ISA_TARGET static void multiply_rows(long rows, const float* tile, long blocks, const float* x, long in, Sums sums,
                                     bool begins) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<R - 1>(rows, tile, blocks, x, in, sums, begins);
  }
  multiply<R>(tile, blocks, x, in, sums, begins);
}

// One group: each piece of `in` is widened once and used by all rows while it is in the first cache.
template <Format F>
ISA_TARGET static void tiled(const Job& job, long group, float* tile, float* partial) {
  const bool is_whole = (group + 1) * kGroup <= job.out;  // the last group may lack outputs
  const Sums sums = is_whole ? Sums{job.y + group * kGroup, job.out} : Sums{partial, kGroup};
  const long slabs = (job.blocks() + kTileBlocks - 1) / kTileBlocks;
  for (long slab = 0, start = 0; slab < slabs; ++slab) {
    const long blocks = (job.blocks() - start + slabs - slab - 1) / (slabs - slab);
    widen_tile<F>(job, group, start, blocks, tile);
    long row = 0;
    for (long left = (job.rows + TILE_ROWS - 1) / TILE_ROWS; left > 0; --left) {
      const long rows = (job.rows - row + left - 1) / left;  // as equal as can be: small tiles are slow
      const Sums of_rows{sums.at(row, 0), sums.stride};
      multiply_rows(rows, tile, blocks, job.x + row * job.in + start * kBlock, job.in, of_rows, start == 0);
      row += rows;
    }
    start += blocks;
  }
  if (is_whole) return;
  for (long row = 0; row < job.rows; ++row)
    for (long v = 0; v < kVectors; ++v) store(job, row, group * kVectors + v, load<Vector>(sums.at(row, v)));
}

// Outputs of the groups first ... last - 1.
template <Format F>
ISA_TARGET static void groups(const Job& job, long first, long last) {
  if (job.rows <= kFusedRows) return fused_rows<F>(job, first, last);
  const std::unique_ptr<float[]> tile(new float[kTileBlocks * kBlock * kGroup]);
  const std::unique_ptr<float[]> partial(new float[last * kGroup > job.out ? job.rows * kGroup : 0]);
  for (; first < last; ++first) tiled<F>(job, first, tile.get(), partial.get());
}

ISA_TARGET static Kernel kernel(Format format) {
  switch (format) {
    case Format::kQ4_0: return groups<Format::kQ4_0>;
    case Format::kQ4_1: return groups<Format::kQ4_1>;
    case Format::kQ8_0: return groups<Format::kQ8_0>;
    default: return groups<Format::kInt8>;
  }
}
