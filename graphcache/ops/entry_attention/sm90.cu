// Attention of one token's 64 heads over its window and compressed entries, for compute capability
// 9.0: rows of 512 dims, the last 64 rotated and in bfloat16. See __init__.py for what it
// computes; this file is about how.
//
// A block takes a split of a token's list, 64 rows at a time. One warpgroup reads rows and leaves
// them decoded in one of two buffers. The next forms logits and weights, and multiplies the weights
// with the first half of the rows' dims; it hands them to the last, which takes the other half.
// Splits of a token are a cluster and add up through its shared memory, in their order.
//
// Compiled with FORMAT (0 bfloat16; 1 e4m3 with a scale a row; 2 e4m3 with an exponent for each 64)
// and SPLITS (1, 2, 4, 8).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int DIM = 512;
constexpr int TILE = 64;            // rows of a buffer, and heads of a block
constexpr int COLUMNS = DIM / 64;   // of 64 dims: 128 bytes a row, the swizzle's width
constexpr int COLUMN = TILE * 128;  // bytes
constexpr int BUFFER = COLUMNS * COLUMN;
constexpr int CONSUMERS = 256;
constexpr int PART_ROW = DIM + 8;   // floats; the 8 keep rows in different banks
constexpr float WEIGHT_SCALE = FORMAT == 1 ? 512.0f : 1.0f;  // a scale is about a row's 448th

constexpr float LOG2_E = 1.4426950408889634f;
#define INFINITE __int_as_float(0x7F800000)

constexpr int Q_AT = 0;
constexpr int ROWS_AT = BUFFER;
constexpr int SCALES_AT = ROWS_AT + 2 * BUFFER;
constexpr int STATS_AT = SCALES_AT + 2 * TILE * 4;
constexpr int BARRIERS_AT = STATS_AT + 2 * TILE * 4;
constexpr int WEIGHTS_AT = BARRIERS_AT + 64;

struct Rows {
  const u8 *values, *rope, *scales;
  i64 values_place, values_row, rope_place, rope_row, scales_place, scales_row;  // bytes
};

struct Arguments {
  Rows window, entries;
  const u16 *q;
  const int *slots, *positions, *table, *selected;
  const float *sinks, *cos, *sin;
  u16 *out;
  i64 q_token, q_head, table_stride;  // elements
  int heads, window_size, ring, compression, held, top_k, min_tiles;
  float factor;
};

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// --- barriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(at), "r"(parity) : "memory");
}

// What threads stored, the tensor cores may read after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
               "memory");
}

// --- numbers ------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 half_pair_of_codes(u32 codes) {
  u32 pair;
  asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(pair) : "r"(codes));
  return pair;
}

__device__ __forceinline__ u32 half_pair_product(u32 a, u32 b) {
  u32 pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// --- products -----------------------------------------------------------------------------------

// A swizzled tile whose groups of 8 lines are 1024 bytes apart. Its steps add to the low half.
struct Tile {
  u32 low;

  __device__ explicit Tile(u32 at) : low((at & 0x3FFFF) >> 4 | 1 << 16) {}

  __device__ u64 operator+(int bytes) const {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | (low + (bytes >> 4));
  }
};

#define LIST8(a, i) \
  "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
      "+f"(a[i + 6]), "+f"(a[i + 7])
#define LIST32(a) LIST8(a, 0), LIST8(a, 8), LIST8(a, 16), LIST8(a, 24)
#define NAMES32                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "  \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// acc [64 x 64] += a [64 x 16] * b [16 x 64]; a from shared memory, b's lines are its columns.
template <bool BFLOAT>
__device__ __forceinline__ void multiply(float *acc, u64 a, u64 b, int accumulate) {
  if constexpr (BFLOAT) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", %32, %33, p, 1, 1, 0, 0;\n}"
        : LIST32(acc) : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES32
        ", %32, %33, p, 1, 1, 0, 0;\n}"
        : LIST32(acc) : "l"(a), "l"(b), "r"(accumulate));
  }
}

// The same with a in registers, and b's lines its rows.
template <bool BFLOAT>
__device__ __forceinline__ void multiply_weights(float *acc, const u32 *a, u64 b) {
  if constexpr (BFLOAT) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : LIST32(acc) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES32
        ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : LIST32(acc) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// All of it is computed here, not between products, each of which would wait for the one before.
__device__ __forceinline__ void settle(float (&acc)[4][32]) {
#pragma unroll
  for (int column = 0; column < 4; ++column) asm volatile("" : LIST32(acc[column])::"memory");
}

__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// --- a token's list -----------------------------------------------------------------------------

struct List {
  int in_window, entries, window_tiles, begin, end, splits;

  // As _list_of in entry_attention.py.
  __device__ List(const Arguments &arguments, int position, int split) {
    in_window = min(position + 1, arguments.window_size);
    window_tiles = (in_window + TILE - 1) / TILE;
    entries = 0;
    if (arguments.compression > 0) {
      entries = (position + 1) / arguments.compression;
      if (arguments.top_k > 0) entries = min(entries, arguments.top_k);
    }
    int tiles = window_tiles + (entries + TILE - 1) / TILE;
    int per_split = max((tiles + SPLITS - 1) / SPLITS, arguments.min_tiles);
    if (SPLITS == 1) per_split = tiles;
    splits = (tiles + per_split - 1) / per_split;
    begin = split * per_split;
    end = min(begin + per_split, tiles);
  }

  __device__ int rows_of(int tile) const {
    return tile < window_tiles ? min(TILE, in_window - tile * TILE)
                               : min(TILE, entries - (tile - window_tiles) * TILE);
  }
};

__device__ __forceinline__ u32 swizzled(int column, int row, int unit) {
  return column * COLUMN + row * 128 + ((unit ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store16(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// --- the warpgroup that reads -------------------------------------------------------------------

// Four threads share a row, and each has two rows of a tile. While a tile is on its way, the next
// one's rows are sent for into the L2 cache, the blocks after those and the entries after these
// are looked up: no tile waits for one look-up after the other.
//
// Rows are copied to where the products read them; codes first lie in the row's own half-empty
// lines, and its threads decode them when all of them have taken theirs.
struct Reader {
  static constexpr bool CODES = FORMAT != 0;

  const Arguments &arguments;
  const List &list;
  const int slot, position, token, group, part, tiles;
  int place_entry[2], place[2], entry[2];
  // Of the tile located last.
  const u8 *values[2], *rope[2], *scales[2];
  bool there[2];

  __device__ Reader(const Arguments &arguments, const List &list, int slot, int position, int token,
                    int thread)
      : arguments(arguments), list(list), slot(slot), position(position), token(token),
        group(thread >> 2), part(thread & 3), tiles(list.end - list.begin) {
    int first[2] = {entry_of(0, 0), entry_of(0, 1)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      place_entry[h] = entry_of(1, h);
      entry[h] = entry_of(2, h);
    }
    int first_place[2] = {place_of(first[0]), place_of(first[1])};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      place[h] = place_of(place_entry[h]);
      locate(0, h, first[h], first_place[h]);
    }
  }

  __device__ bool inside(int turn, int h) const {
    return turn < tiles && group + 32 * h < list.rows_of(list.begin + turn);
  }

  __device__ int entry_of(int turn, int h) const {
    int tile = list.begin + turn - list.window_tiles;
    if (tile < 0 || !inside(turn, h)) return 0;
    int at = tile * TILE + group + 32 * h;
    return arguments.top_k > 0 ? arguments.selected[(i64)token * arguments.top_k + at] : at;
  }

  __device__ int place_of(int entry) const {
    if (arguments.compression == 0) return 0;
    return arguments.table[slot * arguments.table_stride + (u32)entry / (u32)arguments.held];
  }

  __device__ void locate(int turn, int h, int entry, int place) {
    there[h] = inside(turn, h);
    const bool window = list.begin + turn < list.window_tiles || !there[h];
    const Rows &rows = window ? arguments.window : arguments.entries;
    const u32 x = position + 1 - list.in_window + (list.begin + turn) * TILE + group + 32 * h;
    const i64 at = window ? slot : place;
    u32 row = window ? x % (u32)arguments.ring : (u32)entry % (u32)arguments.held;
    if (!there[h]) row = 0;
    values[h] = rows.values + at * rows.values_place + row * rows.values_row + part * 16;
    if (CODES) {
      rope[h] = rows.rope + at * rows.rope_place + row * rows.rope_row + part * 16;
      scales[h] = rows.scales + at * rows.scales_place + row * rows.scales_row;
    }
  }

  __device__ void look_ahead(int turn) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      locate(turn + 1, h, place_entry[h], place[h]);
      if (there[h]) {
        prefetch(values[h] + part * 112);
        if (CODES && part == 0) prefetch(rope[h]);
      }
      place_entry[h] = entry[h];
      place[h] = place_of(entry[h]);
      entry[h] = entry_of(turn + 3, h);
    }
  }

  __device__ static void prefetch(const u8 *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }

  // Zeros where no row is: memory that was never written may hold NaN, which no weight masks.
  __device__ void copy16(u32 to, const u8 *from, int h) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there[h] ? 16 : 0) : "memory");
  }

  __device__ void copy(int h, u32 buffer, u32 scales_at) const {
    const int row = group + 32 * h;
    if constexpr (CODES) {
#pragma unroll
      for (int j = 0; j < 7; ++j) copy16(buffer + raw(j, row), values[h] + j * 64, h);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        copy16(buffer + swizzled(COLUMNS - 1, row, j * 4 + part), rope[h] + j * 64, h);
      if (FORMAT == 1 && part == 0)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(scales_at + row * 4),
                     "l"(scales[h]), "r"(there[h] ? 4 : 0) : "memory");
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        copy16(buffer + swizzled(j >> 1, row, (j & 1) * 4 + part), values[h] + j * 64, h);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Where codes 64 j + 16 part on of a row lie until they are decoded.
  __device__ u32 raw(int j, int row) const {
    return swizzled(j >> 1, row, (j & 1) * 4 + part);
  }

  __device__ void decode(int h, u32 buffer, const u32 *exponents) const {
    const int row = group + 32 * h;
    u32 codes[7][4];
#pragma unroll
    for (int j = 0; j < 7; ++j)
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes[j][0]), "=r"(codes[j][1]), "=r"(codes[j][2]), "=r"(codes[j][3])
                   : "r"(buffer + raw(j, row)) : "memory");
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 7; ++j) {
      u32 half[8];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        half[2 * k] = half_pair_of_codes(codes[j][k]);
        half[2 * k + 1] = half_pair_of_codes(codes[j][k] >> 16);
      }
      if constexpr (FORMAT == 2) {
        u32 exponent = (exponents[j >> 2] >> (8 * (j & 3))) & 0xFF;
        float power = __uint_as_float(exponent << 23);
        u32 pair = half_pair(power, power);
#pragma unroll
        for (int k = 0; k < 8; ++k) half[k] = half_pair_product(half[k], pair);
      }
      store16(buffer + swizzled(j, row, part * 2), half[0], half[1], half[2], half[3]);
      store16(buffer + swizzled(j, row, part * 2 + 1), half[4], half[5], half[6], half[7]);
    }
  }

  template <int LATER>
  __device__ static void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
  }

  __device__ static void hand_over(u32 barrier) {
    publish_to_tensor_cores();
    barrier_arrive(barrier);
  }

  __device__ void run(u32 base) {
    const u32 full = base + BARRIERS_AT, empty = full + 16;
    for (int turn = 0; turn < tiles; ++turn) {
      const int buffer = turn & 1;
      const u32 rows = base + ROWS_AT + buffer * BUFFER;
      barrier_wait(empty + 8 * buffer, ((turn >> 1) & 1) ^ 1);
      copy(0, rows, base + SCALES_AT + buffer * TILE * 4);
      copy(1, rows, base + SCALES_AT + buffer * TILE * 4);
      u32 exponents[2][2] = {};
      if constexpr (FORMAT == 2) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (there[h]) {
            exponents[h][0] = *(const u32 *)scales[h];
            exponents[h][1] =
                (u32)scales[h][4] | (u32)scales[h][5] << 8 | (u32)scales[h][6] << 16;
          }
      }
      look_ahead(turn);
      if constexpr (CODES) {
        wait_for_copies<1>();
        decode(0, rows, exponents[0]);
        wait_for_copies<0>();
        decode(1, rows, exponents[1]);
        hand_over(full + 8 * buffer);
      } else if (turn > 0) {
        wait_for_copies<2>();
        hand_over(full + 8 * (buffer ^ 1));
      }
    }
    if constexpr (!CODES) {
      wait_for_copies<0>();
      hand_over(full + 8 * ((tiles - 1) & 1));
    }
  }
};

// --- the warpgroups that multiply ---------------------------------------------------------------

// The first warpgroup's threads hand what they hold to their likes in the second.
struct Weights {
  u32 fixed[16], rotated[16];
  float shrink[2];

  __device__ static u32 place(u32 base, int thread, int i) {
    return base + WEIGHTS_AT + i * 2048 + (thread & 127) * 16;
  }

  __device__ void put(u32 base, int thread) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 *four = rotated + 4 * i;
      store16(place(base, thread, i), four[0], four[1], four[2], four[3]);
      if (FORMAT != 0) {
        four = fixed + 4 * i;
        store16(place(base, thread, 4 + i), four[0], four[1], four[2], four[3]);
      }
    }
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place(base, thread, 8)), "f"(shrink[0]),
                 "f"(shrink[1]) : "memory");
  }

  __device__ void take(u32 base, int thread) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load(rotated + 4 * i, place(base, thread, i));
      if (FORMAT != 0) load(fixed + 4 * i, place(base, thread, 4 + i));
    }
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(shrink[0]), "=f"(shrink[1]) : "r"(place(base, thread, 8)) : "memory");
  }

  __device__ static void load(u32 *four, u32 at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3]) : "r"(at) : "memory");
  }
};

__device__ __forceinline__ void weights_are_there(bool wait) {
  if (wait)
    asm volatile("bar.sync 3, 256;" ::: "memory");
  else
    asm volatile("bar.arrive 3, 256;" ::: "memory");
}

__device__ __forceinline__ void weights_are_taken(bool wait) {
  if (wait)
    asm volatile("bar.sync 4, 256;" ::: "memory");
  else
    asm volatile("bar.arrive 4, 256;" ::: "memory");
}

// Queries to shared memory, in the products' types.
__device__ __forceinline__ void fetch_queries(const Arguments &arguments, u32 base, int thread,
                                              const u16 *q) {
#pragma unroll
  for (int batch = 0; batch < 2; ++batch) {
    uint4 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (batch * 8 + i) * CONSUMERS + thread;
      raw[i] = *(const uint4 *)(q + (at >> 6) * arguments.q_head + (at & 63) * 8);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (batch * 8 + i) * CONSUMERS + thread, row = at >> 6, unit = at & 63;
      u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      if (FORMAT != 0 && unit < 56) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          words[k] = half_pair(__uint_as_float(words[k] << 16),
                               __uint_as_float(words[k] & 0xFFFF0000));
      }
      store16(base + Q_AT + swizzled(unit >> 3, row, unit & 7), words[0], words[1], words[2],
              words[3]);
    }
  }
}

// Weights of a tile from its logits, and the running maximum and sum of each of a thread's heads.
__device__ __forceinline__ void weigh(const Arguments &arguments, const Tile &queries,
                                      const Tile &rows, const float *scales, int count, int pair, float *most,
                                      float *sums, Weights &weights) {
  float logits[32];
  products_begin();
#pragma unroll
  for (int column = 0; column < COLUMNS - 1; ++column)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply<FORMAT == 0>(logits, queries + (column * COLUMN + k * 32),
                            rows + (column * COLUMN + k * 32), column + k > 0);
  if constexpr (FORMAT == 1) {
    products_end();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 scale = *(const float2 *)(scales + 8 * j + pair);
      logits[4 * j] *= scale.x, logits[4 * j + 1] *= scale.y;
      logits[4 * j + 2] *= scale.x, logits[4 * j + 3] *= scale.y;
    }
    products_begin();
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply<true>(logits, queries + ((COLUMNS - 1) * COLUMN + k * 32),
                   rows + ((COLUMNS - 1) * COLUMN + k * 32), 1);
  products_end();

  float top[2] = {most[0], most[1]};
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &logit = logits[4 * j + i];
      logit = 8 * j + pair + (i & 1) < count ? logit * arguments.factor : -INFINITE;
      top[i >> 1] = fmaxf(top[i >> 1], logit);
    }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
    top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
    weights.shrink[i] = exp2_of(most[i] - top[i]);
    sums[i] *= weights.shrink[i];
    most[i] = top[i];
  }
  // A product's sums lie among the threads as the next one's operand must.
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = exp2_of(logits[4 * j + i] - top[i >> 1]);
      sums[i >> 1] += weight[i];
    }
    weights.rotated[2 * j] = bfloat_pair(weight[0], weight[1]);
    weights.rotated[2 * j + 1] = bfloat_pair(weight[2], weight[3]);
    if constexpr (FORMAT == 1) {
      float2 scale = *(const float2 *)(scales + 8 * j + pair);
      scale.x *= WEIGHT_SCALE, scale.y *= WEIGHT_SCALE;
      weight[0] *= scale.x, weight[1] *= scale.y, weight[2] *= scale.x, weight[3] *= scale.y;
    }
    if constexpr (FORMAT != 0) {
      weights.fixed[2 * j] = half_pair(weight[0], weight[1]);
      weights.fixed[2 * j + 1] = half_pair(weight[2], weight[3]);
    }
  }
}

// A warpgroup's part of a block's work: half of the output's dims, or with SECOND the other half,
// whose last 64 are the rotated.
template <bool SECOND>
__device__ __forceinline__ void attend_half(const Arguments &arguments, const List &list, u8 *shared,
                                            u32 base, int thread, int token, int first_head,
                                            u16 *out) {
  constexpr int FIRST_COLUMN = SECOND ? 4 : 0;
  const u32 full = base + BARRIERS_AT, empty = full + 16;
  const int lane = thread & 31;
  const int line = ((thread >> 5) & 3) * 16 + (lane >> 2);  // this thread's heads: it and 8 on
  const int pair = (lane & 3) * 2;                          // its columns: 8 j + pair, and 1 on
  if (list.begin < list.end)
    fetch_queries(arguments, base, thread,
                  arguments.q + (i64)token * arguments.q_token + first_head * arguments.q_head);
  publish_to_tensor_cores();
  asm volatile("bar.sync 1, 256;" ::: "memory");

  float acc[4][32];
#pragma unroll
  for (int column = 0; column < 4; ++column)
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[column][i] = 0;
  float most[2] = {-INFINITE, -INFINITE}, sums[2] = {0, 0};
  for (int tile = list.begin; tile < list.end; ++tile) {
    const int turn = tile - list.begin, buffer = turn & 1;
    const Tile rows(base + ROWS_AT + buffer * BUFFER);
    Weights weights;
    barrier_wait(full + 8 * buffer, (turn >> 1) & 1);
    if constexpr (SECOND) {
      weights_are_there(true);
      weights.take(base, thread);
      if (tile + 1 < list.end) weights_are_taken(false);
    } else {
      weigh(arguments, Tile(base + Q_AT), rows, (const float *)(shared + SCALES_AT) + buffer * TILE,
            list.rows_of(tile), pair, most, sums, weights);
      if (turn > 0) weights_are_taken(true);
      weights.put(base, thread);
      weights_are_there(false);
    }
#pragma unroll
    for (int column = 0; column < 4; ++column)
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[column][i] *= weights.shrink[(i >> 1) & 1];
    settle(acc);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        const u64 operand = rows + ((FIRST_COLUMN + column) * COLUMN + k * 2048);
        if constexpr (FORMAT == 0)
          multiply_weights<true>(acc[column], weights.rotated + 4 * k, operand);
        else if (SECOND && column == 3)
          multiply_weights<true>(acc[column], weights.rotated + 4 * k, operand);
        else
          multiply_weights<false>(acc[column], weights.fixed + 4 * k, operand);
      }
    products_end();
    barrier_arrive(empty + 8 * buffer);
  }

  float *stats = (float *)(shared + STATS_AT);
  if constexpr (!SECOND) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
      sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
      if (pair == 0) {
        stats[line + 8 * i] = most[i];
        stats[TILE + line + 8 * i] = sums[i];
      }
    }
  }
  // Both warpgroups are done with queries and rows, and know the maxima and sums.
  asm volatile("bar.sync 1, 256;" ::: "memory");
  if constexpr (SPLITS == 1) {
    float gain[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sink = arguments.sinks[first_head + line + 8 * i] * LOG2_E;
      const float top = fmaxf(stats[line + 8 * i], sink);
      const float shrink = exp2_of(stats[line + 8 * i] - top);
      gain[i] = shrink / (stats[TILE + line + 8 * i] * shrink + exp2_of(sink - top));
    }
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const bool turned = SECOND && column == 3;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float cosine = 1, sine = 0;
        if (turned) {
          cosine = arguments.cos[token * 32 + 4 * j + (pair >> 1)];
          sine = arguments.sin[token * 32 + 4 * j + (pair >> 1)];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float fold = gain[i] * (turned ? 1.0f : 1.0f / WEIGHT_SCALE);
          float even = acc[column][4 * j + 2 * i] * fold;
          float odd = acc[column][4 * j + 2 * i + 1] * fold;
          if (turned) {
            const float x = even * cosine + odd * sine, y = odd * cosine - even * sine;
            even = x, odd = y;
          }
          u16 *at = out + (line + 8 * i) * DIM + (FIRST_COLUMN + column) * 64 + 8 * j + pair;
          *(u32 *)at = bfloat_pair(even, odd);
        }
      }
    }
  } else {
    // The parts go over queries and rows.
    float *parts = (float *)shared;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const float fold = SECOND && column == 3 ? 1.0f : 1.0f / WEIGHT_SCALE;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 two = make_float2(acc[column][4 * j + 2 * i] * fold,
                                         acc[column][4 * j + 2 * i + 1] * fold);
          const int dim = (FIRST_COLUMN + column) * 64 + 8 * j + pair;
          *(float2 *)(parts + (line + 8 * i) * PART_ROW + dim) = two;
        }
    }
  }
}

// --- the kernel ---------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1)
    attend(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const int thread = threadIdx.x;
  const int token = blockIdx.x / SPLITS;
  const int split = blockIdx.x % SPLITS;
  const int first_head = blockIdx.y * TILE;
  const int slot = arguments.slots[token];
  const int position = arguments.positions[token];
  u16 *out = arguments.out + ((i64)token * arguments.heads + first_head) * DIM;
  if (slot < 0) {
    if (split == 0)
      for (int i = thread; i < TILE * DIM / 8; i += blockDim.x)
        ((uint4 *)out)[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  const List list(arguments, position, split);
  const u32 full = base + BARRIERS_AT, empty = full + 16;
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(full + 8 * i, 128);
      barrier_init(empty + 8 * i, CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (thread >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FORMAT == 0 ? 104 : 88));
    if (list.begin < list.end) {
      Reader reader(arguments, list, slot, position, token, thread - CONSUMERS);
      reader.run(base);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FORMAT == 0 ? 200 : 208));
    if (thread < 128)
      attend_half<false>(arguments, list, shared, base, thread, token, first_head, out);
    else
      attend_half<true>(arguments, list, shared, base, thread, token, first_head, out);
  }

  if constexpr (SPLITS > 1) {
    cluster_sync();
    constexpr int SHARE = TILE / SPLITS;
    const int lane = thread & 31;
    for (int head = split * SHARE + (thread >> 5); head < (split + 1) * SHARE; head += 12) {
      // The sink is the first part: a weight without a value.
      float most = arguments.sinks[first_head + head] * LOG2_E, weights = 1;
      float sum[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i] = 0;
      for (int other = 0; other < list.splits; ++other) {
        u32 theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(base), "r"(other));
        float part_most, part_weights;
        asm volatile("ld.shared::cluster.f32 %0, [%1];"
                     : "=f"(part_most) : "r"(theirs + STATS_AT + head * 4));
        asm volatile("ld.shared::cluster.f32 %0, [%1];"
                     : "=f"(part_weights) : "r"(theirs + STATS_AT + (TILE + head) * 4));
        float top = fmaxf(most, part_most);
        float shrink = exp2_of(most - top), gain = exp2_of(part_most - top);
        weights = weights * shrink + part_weights * gain;
        most = top;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float4 part;
          asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                       : "r"(theirs + (head * PART_ROW + k * 128 + lane * 4) * 4));
          sum[4 * k] = sum[4 * k] * shrink + part.x * gain;
          sum[4 * k + 1] = sum[4 * k + 1] * shrink + part.y * gain;
          sum[4 * k + 2] = sum[4 * k + 2] * shrink + part.z * gain;
          sum[4 * k + 3] = sum[4 * k + 3] * shrink + part.w * gain;
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i] /= weights;
      if (lane >= 16) {
#pragma unroll
        for (int i = 12; i < 16; i += 2) {
          int angle = token * 32 + (lane - 16) * 2 + (i - 12) / 2;
          float cosine = arguments.cos[angle], sine = arguments.sin[angle];
          float even = sum[i] * cosine + sum[i + 1] * sine;
          sum[i + 1] = sum[i + 1] * cosine - sum[i] * sine;
          sum[i] = even;
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint2 two = make_uint2(bfloat_pair(sum[4 * k], sum[4 * k + 1]),
                               bfloat_pair(sum[4 * k + 2], sum[4 * k + 3]));
        *(uint2 *)(out + head * DIM + k * 128 + lane * 4) = two;
      }
    }
    cluster_sync();
  }
}
