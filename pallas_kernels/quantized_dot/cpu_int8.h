// Products with x rounded to 8 bits, for one instruction set; cpu.cc includes this file after cpu_kernel.h, in the same
// namespace, which then also defines `nearest` (rounds), `narrow` (a block as bytes) and, with AVX2, HAS_MADDUBS. Codes
// of 4 bits times 8-bit numbers are summed exactly in integers, block by block; a block's sum then meets the weights'
// scale and x's step. So a row's result never depends on how many rows there are.

// The sum and the largest of a vector's numbers.
ISA_TARGET static inline int32_t sum_of(Int x) {
  Int4 parts[LANES / 4];
  std::memcpy(parts, &x, sizeof x);
  for (long i = 1; i < LANES / 4; ++i) parts[0] += parts[i];
  return parts[0][0] + parts[0][1] + parts[0][2] + parts[0][3];
}

ISA_TARGET static inline int32_t largest_of(Int x) {
  Int4 parts[LANES / 4];
  std::memcpy(parts, &x, sizeof x);
  for (long i = 1; i < LANES / 4; ++i) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
  return std::max(std::max(parts[0][0], parts[0][1]), std::max(parts[0][2], parts[0][3]));
}

// Rows first ... last - 1 of x in blocks of 32: 8-bit numbers, a step, and the sum of the numbers times the step.
// A number is round(x * (127 / largest of the block)). A block with something infinite or not a number makes its row NaN.
ISA_TARGET static void round_rows(const Job& job, const Rounded& rounded, long first, long last) {
  constexpr long kParts = kBlock / LANES;
  constexpr int32_t kInfinity = 0x7f800000;
  for (long place = first * job.blocks(); place < last * job.blocks(); ++place) {
    const float* x = job.x + place * kBlock;
    Int most{};  // bits of sizes: in their order, and those of infinity and of what is not a number come last
    for (long p = 0; p < kParts; ++p) {
      const Int size = load<Int>(x + p * LANES) & 0x7fffffff;
      most = size > most ? size : most;
    }
    const int32_t bits = largest_of(most);
    const bool is_finite = bits < kInfinity;
    const float largest = load<float>(&bits);
    const float up = is_finite && largest > kSmallest ? 127.0f / largest : 0.0f;
    Int numbers[kParts], sums{};
    for (long p = 0; p < kParts; ++p) {
      numbers[p] = is_finite ? __builtin_convertvector(nearest(load<Vector>(x + p * LANES) * up), Int) : Int{};
      sums += numbers[p];
    }
    narrow(numbers, rounded.numbers + place * kBlock);
    const float step = is_finite ? largest * (1.0f / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    rounded.steps[place] = step;
    rounded.totals[place] = step * static_cast<float>(sum_of(sums));
  }
}

// Rows of x that are worked on while a piece of the weights is in the first cache, and while x is in the second.
constexpr long kRowsTogether = 96;
constexpr int kRowsAtOnce = 4;  // whose sums stay in sixteen registers

#ifdef HAS_MADDUBS
// sums += codes[0] * numbers[0] + codes[1] * numbers[1] for each pair of bytes. One piece of assembly, because GCC would
// ask for all numbers first and then lack registers for the sums.
ISA_TARGET static inline __m256i add_pairs(__m256i sums, __m256i codes, __m256i numbers) {
  __m256i products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(numbers));
  return sums;
}

// R rows of x from `row` on times one group of outputs.
template <Format F, int R>
ISA_TARGET static void multiply_rounded(const Job& job, const Rounded& x, long group, long row) {
  Vector sum[R][kVectors] = {};
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const long blocks = job.blocks();
  const int8_t* numbers = x.numbers + row * job.in;
  for (long i = 0; i < blocks; ++i) {
    Block b[kVectors];
    UNROLL for (int v = 0; v < kVectors; ++v) b[v] = block<F>(job, group * kVectors + v, i);
    __m256i pairs[R][kVectors] = {};  // 16 bits hold eight products of pairs: 8 * 2 * 15 * 127 = 30,480
    for (long p = 0; p < 4; ++p, numbers += kQuad) {
      UNROLL for (int nibble = 0; nibble < 2; ++nibble) {
        __m256i codes[kVectors];
        UNROLL for (int v = 0; v < kVectors; ++v) {
          codes[v] = _mm256_srli_epi16(load<__m256i>(b[v].codes + p * kQuad * kGroup), 4 * nibble) & low;
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const __m256i each = _mm256_set1_epi32(load<int32_t>(numbers + r * job.in + 16 * nibble));
          UNROLL for (int v = 0; v < kVectors; ++v) pairs[r][v] = add_pairs(pairs[r][v], codes[v], each);
        }
      }
    }
    numbers += 16;
    UNROLL for (int r = 0; r < R; ++r) {
      const long place = (row + r) * blocks + i;
      const Vector step = splat(x.steps[place]), total = splat(x.totals[place]);
      UNROLL for (int v = 0; v < kVectors; ++v) {
        const Vector whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[r][v], ones));
        sum[r][v] = fma(total, b[v].min, fma(whole * step, b[v].scale, sum[r][v]));
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int v = 0; v < kVectors; ++v) store(job, row + r, group * kVectors + v, sum[r][v]);
}
#else
// R rows of x from `row` on times one group of outputs.
template <Format F, int R>
ISA_TARGET static void multiply_rounded(const Job& job, const Rounded& x, long group, long row) {
  for (long end = row + R; row < end; ++row) {
    for (long vector = group * kVectors; vector < (group + 1) * kVectors; ++vector) {
      Vector sum{};
      for (long i = 0; i < job.blocks(); ++i) {
        const Block b = block<F>(job, vector, i);
        const long place = row * job.blocks() + i;
        const int8_t* numbers = x.numbers + place * kBlock;
        Int whole{};
        for (long k = 0; k < 16; ++k) {
          const Int pair = load<Int>(b.codes + k / kQuad * kQuad * kGroup) >> k % kQuad * 8;
          whole += (pair & 15) * numbers[k] + (pair >> 4 & 15) * numbers[k + 16];
        }
        sum = fma(__builtin_convertvector(whole, Vector) * splat(x.steps[place]), b.scale, sum);
        sum = fma(splat(x.totals[place]), b.min, sum);
      }
      store(job, row, vector, sum);
    }
  }
}
#endif

template <Format F, int R = kRowsAtOnce>
ISA_TARGET static void multiply_rounded_rows(const Job& job, const Rounded& x, long group, long row, long rows) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rounded_rows<F, R - 1>(job, x, group, row, rows);
  }
  multiply_rounded<F, R>(job, x, group, row);
}

// Outputs of the groups first ... last - 1.
template <Format F>
ISA_TARGET static void rounded_groups(const Job& job, const Rounded& x, long first, long last) {
  for (long start = 0; start < job.rows; start += kRowsTogether) {
    const long end = std::min(start + kRowsTogether, job.rows);
    for (long group = first; group < last; ++group) {
      for (long row = start, rows, left = (end - start + kRowsAtOnce - 1) / kRowsAtOnce; left > 0; --left, row += rows) {
        rows = (end - row + left - 1) / left;  // as equal as can be: small tiles are slow
        multiply_rounded_rows<F>(job, x, group, row, rows);
      }
    }
  }
}

ISA_TARGET static RoundedKernel rounded_kernel(Format format) {
  return format == Format::kQ4_0 ? rounded_groups<Format::kQ4_0> : rounded_groups<Format::kQ4_1>;
}
