// Vectors of floats of one instruction set, and what stored numbers become; cpu_kernel.h includes this file, which has
// no include guard for the same reason.

constexpr int kLanes = ISA_LANES;

typedef float V __attribute__((vector_size(4 * ISA_LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * ISA_LANES), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(2 * ISA_LANES), aligned(2), may_alias));
typedef int8_t Byte __attribute__((vector_size(ISA_LANES), aligned(1), may_alias));
typedef float V4 __attribute__((vector_size(16), aligned(4), may_alias));

#define ISA_INLINE static inline __attribute__((always_inline)) ISA_TARGET
#define ISA_FUNCTION static __attribute__((noinline)) ISA_TARGET
#define UNROLL _Pragma("GCC unroll 8")

// Keeps GCC from loading everything first, which leaves too few registers for the sums.
#if ISA_LANES >= 8
#define KEEP_ORDER(x) asm("" : "+v"(x))
#else
#define KEEP_ORDER(x)
#endif

ISA_INLINE V Load(const float* p) { return *reinterpret_cast<const V*>(p); }
ISA_INLINE void Store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }

// Stored numbers as floats; a bfloat16 is the upper half of one. GCC 12 makes three times as many instructions of
// __builtin_convertvector.
#if ISA_LANES == 16
ISA_INLINE I Integers(const uint16_t* p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
ISA_INLINE I Integers(const int8_t* p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif ISA_LANES == 8
ISA_INLINE I Integers(const uint16_t* p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
ISA_INLINE I Integers(const int8_t* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
ISA_INLINE I Integers(const uint16_t* p) { return __builtin_convertvector(*reinterpret_cast<const Half*>(p), I); }
ISA_INLINE I Integers(const int8_t* p) { return __builtin_convertvector(*reinterpret_cast<const Byte*>(p), I); }
#endif
ISA_INLINE V Load(const uint16_t* p) { return reinterpret_cast<V>(Integers(p) << 16); }
ISA_INLINE V Load(const int8_t* p) { return __builtin_convertvector(Integers(p), V); }
ISA_INLINE V Load(const Float8* p) {
  const I bits = Integers(reinterpret_cast<const int8_t*>(p)), size = bits & 127;
  const I normal = (size << 20) + (120 << 23);  // exponents of a float are 120 larger
  const I small = reinterpret_cast<I>(__builtin_convertvector(size, V) * 0x1p-9f);
  const I value = size < 8 ? small : size == 127 ? (I{} + 0x7FC00000) : normal;
  return reinterpret_cast<V>(value | (bits & INT32_MIN));
}

ISA_INLINE V Splat(float x) { return x - V{}; }

constexpr float kLog2E = 1.44269504f;

#define EACH UNROLL for (int i = 0; i < N; ++i)

// e^x of N vectors with x <= 0, as powers of two: exactly 0 where 2^-126 is not reached, and NaN for NaN. The steps of
// all vectors alternate: the chain of one is so long that the core could not look ahead to the next.
template <int N>
ISA_INLINE void Exponentials(V (&x)[N]) {
  const float shift = 12582912.0f + 127.0f;  // 1.5 * 2^23 rounds to an integer in the low bits; 127 makes an exponent
  V t[N], r[N], p[N];
  EACH x[i] = x[i] * kLog2E;
  EACH t[i] = x[i] + shift;
  EACH r[i] = x[i] - (t[i] - shift);
  EACH p[i] = 1.53533619e-4f * r[i] + 1.33988744e-3f;
  EACH p[i] = p[i] * r[i] + 9.61843736e-3f;
  EACH p[i] = p[i] * r[i] + 5.55033247e-2f;
  EACH p[i] = p[i] * r[i] + 2.40226479e-1f;
  EACH p[i] = p[i] * r[i] + 6.93147203e-1f;
  EACH p[i] = p[i] * r[i] + 1.0f;
  EACH p[i] = p[i] * reinterpret_cast<V>(reinterpret_cast<I>(t[i]) << 23);
  EACH x[i] = reinterpret_cast<V>(reinterpret_cast<I>(p[i]) & ~(x[i] < -126.0f));
}

#undef EACH

ISA_INLINE V Exponential(V x) {
  V only[1] = {x};
  Exponentials(only);
  return only[0];
}

ISA_INLINE float Exponential(float x) { return Exponential(Splat(x))[0]; }

// cap * tanh(x / cap)
ISA_INLINE V SoftCap(V x, float cap) {
  V y = x / cap;
  V e = Exponential((y < 0.0f ? y : -y) * 2.0f);
  V t = cap * (1.0f - e) / (1.0f + e);
  return y < 0.0f ? -t : t;
}

template <bool kLargest, class T>
ISA_INLINE T Both(T a, T b) { return kLargest ? (a > b ? a : b) : a + b; }

// The sums (or the largest) of the lanes of a, of b, of c and of d, always taken in the same order.
template <bool kLargest = false>
ISA_INLINE V4 FoldLanes(V a, V b, V c, V d) {
#if ISA_LANES == 16
  typedef float V8 __attribute__((vector_size(32), aligned(4), may_alias));
  V8 wide[4];
  const V in[4] = {a, b, c, d};
  UNROLL for (int i = 0; i < 4; ++i) {
    V8 parts[2];
    memcpy(parts, &in[i], sizeof(V));
    wide[i] = Both<kLargest>(parts[0], parts[1]);
  }
  V8 x = wide[0], y = wide[1], z = wide[2], w = wide[3];
#else
  V x = a, y = b, z = c, w = d;
#endif
#if ISA_LANES >= 8
  auto xy = Both<kLargest>(SHUFFLE8(x, y, 0, 1, 10, 11, 4, 5, 14, 15), SHUFFLE8(x, y, 2, 3, 8, 9, 6, 7, 12, 13));
  auto zw = Both<kLargest>(SHUFFLE8(z, w, 0, 1, 10, 11, 4, 5, 14, 15), SHUFFLE8(z, w, 2, 3, 8, 9, 6, 7, 12, 13));
  auto all = Both<kLargest>(SHUFFLE8(xy, zw, 0, 2, 8, 10, 4, 6, 12, 14), SHUFFLE8(xy, zw, 1, 3, 9, 11, 5, 7, 13, 15));
  V4 halves[2];
  memcpy(halves, &all, sizeof(all));
  return Both<kLargest>(halves[0], halves[1]);
#else
  auto xy = Both<kLargest>(SHUFFLE4(x, y, 0, 1, 6, 7), SHUFFLE4(x, y, 2, 3, 4, 5));
  auto zw = Both<kLargest>(SHUFFLE4(z, w, 0, 1, 6, 7), SHUFFLE4(z, w, 2, 3, 4, 5));
  return Both<kLargest>(SHUFFLE4(xy, zw, 0, 2, 4, 6), SHUFFLE4(xy, zw, 1, 3, 5, 7));
#endif
}
