// Products with x rounded to 8 bits, for one instruction set; cpu.cc includes this file after cpu_kernel.h, in the same
// namespace. Codes of 4 bits times 8-bit numbers are summed exactly in integers, block by block; a block's sum then
// meets the weights' scale and x's step. So a row's result never depends on how many rows there are.

// Rows first ... last - 1 of x in blocks of 32: 8-bit numbers, a step, and the sum of the numbers times the step.
// A number is round(x * (127 / largest of the block)). A block with something infinite or not a number makes its row NaN.
ISA_TARGET static void round_rows(const Job& job, const Rounded& rounded, long first, long last) {
  constexpr long kParts = kBlock / LANES;
  for (long place = first * job.blocks(); place < last * job.blocks(); ++place) {
    Vector x[kParts], most{}, zero{};
    for (long p = 0; p < kParts; ++p) {
      x[p] = load<Vector>(job.x + place * kBlock + p * LANES);
      const Vector size = x[p] < 0.0f ? -x[p] : x[p];
      most = size > most ? size : most;
      zero += x[p] * 0.0f;
    }
    float largest = 0.0f, finite = 0.0f;
    for (long i = 0; i < LANES; ++i) largest = std::max(largest, most[i]), finite += zero[i];
    const float step = finite == 0.0f ? largest * (1.0f / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    const float up = finite == 0.0f && largest > kSmallest ? 127.0f / largest : 0.0f;
    int32_t numbers[kBlock];
    Int sums{};
    for (long p = 0; p < kParts; ++p) {
      const Int each = finite == 0.0f ? __builtin_convertvector(nearest(x[p] * up), Int) : Int{};
      std::memcpy(numbers + p * LANES, &each, sizeof each);
      sums += each;
    }
    int32_t total = 0;
    for (long i = 0; i < LANES; ++i) total += sums[i];
    for (long quad = 0; quad < kQuads; ++quad) {
      for (long i = 0; i < 4; ++i) rounded.numbers[place * kBlock + quad * 4 + i] = numbers[weight_of(quad, i)];
    }
    rounded.steps[place] = step;
    rounded.totals[place] = step * static_cast<float>(total);
  }
}

#ifdef HAS_QUADS
// A group's weights of some blocks: bytes [blocks, quad, output, 4], scales and mins [blocks, output].
struct QuadTile {
  uint8_t quads[kQuadBlocks * kQuads * kGroup * 4];
  float scales[kQuadBlocks * kGroup], mins[kQuadBlocks * kGroup];
};

// Codes of one block, [16, kGroup] pairs of 4 bits, as bytes [quad, output, 4].
ISA_TARGET static inline void widen_quads(const uint8_t* codes, uint8_t* to) {
  const __m256i low = _mm256_set1_epi8(15);
  for (long part = 0; part < 4; ++part, codes += 64, to += 128) {
    const __m256i a = load<__m256i>(codes), b = load<__m256i>(codes + 32);  // rows k, k + 1 and k + 2, k + 3
    const __m256i a_low = a & low, a_high = _mm256_srli_epi16(a, 4) & low;
    const __m256i b_low = b & low, b_high = _mm256_srli_epi16(b, 4) & low;
    const __m256i a0 = _mm256_unpacklo_epi8(a_low, a_high), a1 = _mm256_unpackhi_epi8(a_low, a_high);
    const __m256i b0 = _mm256_unpacklo_epi8(b_low, b_high), b1 = _mm256_unpackhi_epi8(b_low, b_high);
    const __m256i u0 = _mm256_unpacklo_epi16(a0, b0), u1 = _mm256_unpackhi_epi16(a0, b0);
    const __m256i u2 = _mm256_unpacklo_epi16(a1, b1), u3 = _mm256_unpackhi_epi16(a1, b1);
    const __m256i in_order[] = {_mm256_permute2x128_si256(u0, u1, 0x20), _mm256_permute2x128_si256(u2, u3, 0x20),
                                _mm256_permute2x128_si256(u0, u1, 0x31), _mm256_permute2x128_si256(u2, u3, 0x31)};
    std::memcpy(to, in_order, sizeof in_order);
  }
}

template <Format F>
ISA_TARGET static void fill(const Job& job, long group, long start, long blocks, QuadTile& tile) {
  for (long i = 0; i < blocks; ++i) {
    widen_quads(block<F>(job, group * kVectors, start + i).codes, tile.quads + i * kQuads * kGroup * 4);
    for (long v = 0; v < kVectors; ++v) {
      const Block b = block<F>(job, group * kVectors + v, start + i);
      std::memcpy(tile.scales + i * kGroup + v * LANES, &b.scale, sizeof b.scale);
      std::memcpy(tile.mins + i * kGroup + v * LANES, &b.min, sizeof b.min);
    }
  }
}

// R rows of x, from block `place` of `all` a row, times one tile, added to the sums, which begin at zero where `begins`.
template <int R>
ISA_TARGET static void multiply_quads(const QuadTile& tile, long blocks, const Rounded& x, long place, long all,
                                      Sums sums, bool begins) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = begins ? Vector{} : load<Vector>(sums.at(r, v));
  const uint8_t* w = tile.quads;
  const int8_t* numbers = x.numbers + place * kBlock;
  const __m256i ones = _mm256_set1_epi16(1);
  for (long i = 0; i < blocks; ++i) {
    __m256i pairs[R][kVectors] = {};  // 16 bits hold eight products of pairs: 8 * 2 * 15 * 127 = 30,480
#pragma GCC unroll 2
    for (long quad = 0; quad < kQuads; ++quad, w += kGroup * 4, numbers += 4) {
      __m256i codes[kVectors];
      for (int v = 0; v < kVectors; ++v) codes[v] = load<__m256i>(w + v * 32);
      for (int r = 0; r < R; ++r) {
        const __m256i each = _mm256_set1_epi32(load<int32_t>(numbers + r * all * kBlock));
        for (int v = 0; v < kVectors; ++v) pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(codes[v], each));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vector scale = load<Vector>(tile.scales + i * kGroup + v * LANES);
      const Vector min = load<Vector>(tile.mins + i * kGroup + v * LANES);
      for (int r = 0; r < R; ++r) {
        const long at = place + r * all + i;
        const Vector whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[r][v], ones));
        sum[r][v] = fma(splat(x.totals[at]), min, fma(whole * splat(x.steps[at]), scale, sum[r][v]));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) std::memcpy(sums.at(r, v), &sum[r][v], sizeof(Vector));
}

template <int R = TILE_ROWS>
ISA_TARGET static void multiply_quad_rows(long rows, const QuadTile& tile, long blocks, const Rounded& x, long place,
                                          long all, Sums sums, bool begins) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_quad_rows<R - 1>(rows, tile, blocks, x, place, all, sums, begins);
  }
  multiply_quads<R>(tile, blocks, x, place, all, sums, begins);
}

// Outputs of the groups first ... last - 1, walked like `tiled`.
template <Format F>
ISA_TARGET static void rounded_groups(const Job& job, const Rounded& x, long first, long last) {
  const std::unique_ptr<QuadTile> tile(new QuadTile);
  const std::unique_ptr<float[]> partial(new float[last * kGroup > job.out ? job.rows * kGroup : 0]);
  for (long group = first; group < last; ++group) {
    const bool is_whole = (group + 1) * kGroup <= job.out;
    const Sums sums = is_whole ? Sums{job.y + group * kGroup, job.out} : Sums{partial.get(), kGroup};
    for (long start = 0, blocks; start < job.blocks(); start += blocks) {
      blocks = std::min(job.blocks() - start, kQuadBlocks);
      fill<F>(job, group, start, blocks, *tile);
      for (long row = 0, rows, left = (job.rows + TILE_ROWS - 1) / TILE_ROWS; left > 0; --left, row += rows) {
        rows = (job.rows - row + left - 1) / left;
        multiply_quad_rows(rows, *tile, blocks, x, row * job.blocks() + start, job.blocks(),
                           Sums{sums.at(row, 0), sums.stride}, start == 0);
      }
    }
    if (is_whole) continue;
    for (long row = 0; row < job.rows; ++row)
      for (long v = 0; v < kVectors; ++v) store(job, row, group * kVectors + v, load<Vector>(sums.at(row, v)));
  }
}
#else
// Outputs of the groups first ... last - 1, a vector of one row at a time.
template <Format F>
ISA_TARGET static void rounded_groups(const Job& job, const Rounded& x, long first, long last) {
  for (long vector = first * kVectors; vector < last * kVectors; ++vector) {
    for (long row = 0; row < job.rows; ++row) {
      Vector sum{};
      for (long i = 0; i < job.blocks(); ++i) {
        const Block b = block<F>(job, vector, i);
        const long place = row * job.blocks() + i;
        Int whole{};
        for (long number = 0; number < kBlock; ++number) {
          const long weight = weight_of(number / 4, number % 4);
          const Int pair = bytes(b.codes + weight % 16 * kGroup);
          whole += (weight < 16 ? pair & 15 : pair >> 4) * x.numbers[place * kBlock + number];
        }
        sum = fma(__builtin_convertvector(whole, Vector) * splat(x.steps[place]), b.scale, sum);
        sum = fma(splat(x.totals[place]), b.min, sum);
      }
      store(job, row, vector, sum);
    }
  }
}
#endif

ISA_TARGET static RoundedKernel rounded_kernel(Format format) {
  return format == Format::kQ4_0 ? rounded_groups<Format::kQ4_0> : rounded_groups<Format::kQ4_1>;
}
