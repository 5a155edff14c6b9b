// The verify kernel: all that follows the convolution, one launch a layer.
//
// One block takes one value head of one request. Rows of its window: P pending ones (a chain), then the n of the tree,
// together R, the joint rows; their keys k and values v are inputs, kept in a ring. With kappa = 1/|k|, rho = 1/|q|,
// c = log decays summed along the path (fp64, so that differences of large sums keep their digits) and w = kappa u:
//
//     (I + L) w = b (v - exp(c) kappa S k)        b = beta kappa,  L[i,j] = b_i kappa_i exp(c_i - c_j) k_i.k_j,  j above i
//     o = rho (exp(c) S q + sum_j exp(c_i - c_j) (q.k_j) w_j) / sqrt(dk)          j above i, or i
//     fold: S <- exp(c_P) S + sum over pending j of exp(c_P - c_j) w_j k_j^T
//
// What makes it fast
//   * Bytes. The state is read once and nothing is written but outputs and gates. A pending row is its inputs, 12 KiB a
//     layer at 32 heads of 128; an fp32 pseudo-value with its key would be 20 KiB, read every round and written once more.
//   * Bytes in flight. The state comes by the tensor copy engine, 32 KiB (bf16) by one thread, in the permutation that the
//     matrix unit's loads want, and four or five blocks an SM wait for theirs while others compute. The small rows are asked
//     for first: behind the states of all blocks they would come last, and everything starts with them.
//   * No address waits for another one: the convolution has left the place in the ring where the request's slot stands.
//   * The matrix unit. dv is M, rows of the window are N, in steps of 8, so a window of 4 rows is not padded to 16 or 64.
//     16-bit keys, queries and states are multiplied as they are: exact products, fp32 sums.
//   * The order. L depends on keys and gates alone, so inverses of its diagonal blocks are made while the state travels.
//   * The solve is forward substitution by blocks of 8 on the matrix unit: TF32 with both operands split in two, error
//     2^-21. Accumulators of one product are, register by register, the operand of the next.
//
// Compiled with: DK, DV (64, 128, 256); WINDOW (rows, 0 for a fold alone); ROWS (capacity of the history + WINDOW); BF16
// (else fp16); STATE32; NORM; GATES32, WEIGHT32 (a and b, the norm's weight, are fp32).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

struct Arguments {
    const u16* queries;   // [B, T, H, DK]
    const u16* keys;      // [R, ring, H, DK]
    const u16* values;    // [R, ring, HV, DV]
    float2* gates;        // [R, ring, HV] log decay, beta
    const void* a;        // [B, T, HV]
    const void* b;
    const u16* z;         // [B, T, HV, DV], read if NORM
    const void* weight;   // [DV], read if NORM
    u16* out;             // [B, T, HV, DV]
    const int* end;       // [R], read if T is 0
    int* pending;         // [R, HV]
    const int2* places;   // [B] end, most pending rows of a head
    const i64* slots;     // [B]
    const i64* requests;  // [B]
    const int* rows;      // [B]
    const u64* ancestors; // [B, T]
    const int* longest;   // [B]
    const float* neg_A;   // [HV]
    const float* dt_bias; // [HV]
    i64 a_stride, a_row, b_stride, b_row, z_stride, z_row;
    int ring, capacity, H, HV, fold_always;
    float beta_scale, eps, norm_eps;
};

constexpr int at_least(int x, int y) { return x > y ? x : y; }
constexpr int at_most(int x, int y) { return x < y ? x : y; }
constexpr int T = WINDOW;
constexpr int KT = (ROWS + 7) / 8, QT = at_least(1, (T + 7) / 8); // tiles of 8 rows: joint, of queries
#ifndef WARPS
#define WARPS (QT > 2 ? DV / 16 : at_least(4, DV / 32))
#endif
constexpr int THREADS = 32 * WARPS;
constexpr int MT = DV / (16 * WARPS);        // tiles of 16 dv rows of a warp
constexpr int KR = 8 * KT, QR = 8 * QT, XT = KT + QT;
template <bool WIDE> struct MaskOf { using type = u64; };
template <> struct MaskOf<false> { using type = u32; };
using Mask = MaskOf<(QT > 4)>::type;         // ancestors of a row
constexpr int MS = KR % 16 ? KR : KR + 8;    // row stride of the squares; 8 or 24 mod 32: no bank conflicts
constexpr int OS = DV + 4;                   // row stride of the outputs
constexpr int STATE_BYTES = STATE32 ? 4 : 2;
// Bytes of a row in shared memory: padded, so that what a warp reads together lies in different banks.
constexpr int X_ROW = DK * 2 + 16, V_ROW = DV * 2 + 16;
// The state comes and goes by the tensor copy engine, in slices of 128 bytes a row, which permutes each row's 16 bytes.
constexpr int SLICES = DK * STATE_BYTES / 128;

constexpr int later(int at, int bytes) { return at + (bytes + 15) / 16 * 16; }
// The state; keys, then queries; values; squares; what is known of rows.
constexpr int AT_S = 0;
constexpr int AT_BARRIER = DV * DK * STATE_BYTES;
constexpr int AT_X = AT_BARRIER + 16;
constexpr int AT_V = later(AT_X, (ROWS + T) * X_ROW);
constexpr int AT_OUT = AT_X + ROWS * X_ROW; // in the place of queries and values, when these are used up
constexpr int AT_M = at_least(later(AT_V, ROWS * V_ROW), later(AT_OUT, T * OS * 4));
constexpr int AT_A = later(AT_M, KR * MS * 4);
constexpr int AT_GATES = later(AT_A, T * MS * 4);   // float2: log decay, beta
constexpr int AT_C = later(AT_GATES, KR * 8);        // float2: c, in two parts
constexpr int AT_KEYROWS = later(AT_C, KR * 8);      // float4: b, exp(c) kappa, -b kappa
constexpr int AT_QROWS = later(AT_KEYROWS, KR * 16); // float2: rho / sqrt(dk), exp(c) rho / sqrt(dk)
constexpr int AT_MASKS = later(AT_QROWS, QR * 8);
constexpr int SHARED = later(AT_MASKS, QR * 8); // a tile past the last row reads what follows, into columns of nobody

// Blocks that an SM is to hold: as many as fit its shared memory, with the registers that accumulators need.
constexpr int REGISTERS = at_most(255, 72 + 4 * MT * XT);
#ifndef BLOCKS
constexpr int BLOCKS = at_least(1, at_most(227 * 1024 / (SHARED + 1024), 65536 / (THREADS * REGISTERS)));
#endif
extern "C" __constant__ const int launch_bounds[2] = {THREADS, SHARED};

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define D __device__ __forceinline__

// ---- 16-bit numbers

#if BF16
#define KIND "bf16"
D float low(u32 pair) { return __uint_as_float(pair << 16); }
D float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
D u32 pack(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#else
#define KIND "f16"
D float low(u32 pair) {
    float wide;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(wide) : "r"(pair));
    return wide;
}
D float high(u32 pair) {
    float wide;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(wide) : "r"(pair));
    return wide;
}
D u32 pack(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#endif

template <int IS32> D float element(const void* base, i64 at) {
    return IS32 ? static_cast<const float*>(base)[at] : low(static_cast<const u16*>(base)[at]);
}

// ---- Shared memory and the matrix unit

D u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

template <int BYTES> D void copy(u32 to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
D void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A barrier that counts the bytes of a state.
D void open(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
D void wait(u32 barrier) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra again;}" ::"r"(barrier) : "memory");
}
D void read_state(u32 to, const TensorMap& map, int head, int slot, u32 barrier) {
    asm volatile("{.reg .b64 token; mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1;}"
                 ::"r"(barrier), "n"(DV * DK * STATE_BYTES) : "memory");
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                     ::"r"(to + slice * (DV * 128)), "l"(&map), "r"(slice * (128 / STATE_BYTES)), "r"(head * DV), "r"(slot),
                     "r"(barrier) : "memory");
}
D void write_state(const TensorMap& map, int head, int slot, u32 from) {
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice)
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
                     ::"l"(&map), "r"(slice * (128 / STATE_BYTES)), "r"(head * DV), "r"(slot), "r"(from + slice * (DV * 128))
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// A launch may begin while the one before it ends (programmatic dependent launch).
D void after_launch_before() { asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory"); }
D void before_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where rows are: keys first, in tiles; then queries, in tiles. Where the 16 bytes `chunk` of a row are.
D int memory_row(int x) { return x < KR ? x : x - KR + ROWS; }
D int x_at(int row, int chunk) { return row * X_ROW + chunk * 16; }
D int v_at(int row, int chunk) { return row * V_ROW + chunk * 16; }
D int s_at(int row, int chunk) { return chunk / 8 * (DV * 128) + row * 128 + ((chunk % 8 ^ row & 7) << 4); }

D void load4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
D void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

D void load_transposed(u32 (&r)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from));
}

// c += a b, 16 x 16 by 16 x 8, 16-bit.
D void product16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b, 16 x 8 by 8 x 8, TF32.
D void product32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An fp32 number as two of TF32, which the matrix unit cuts to their upper 19 bits: x = big + small (1 + 2^-10).
D void split(float x, u32& big, u32& small) {
    big = __float_as_uint(x) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
}

// A tile of accumulators, 16 dv rows by 8 rows, as the left operand of the next product. The matrix unit's k-th column
// is row 2k of the tile for k < 4 and row 2 (k - 4) + 1 above, on both sides of the product.
struct Left {
    u32 big[4], small[4];
    D Left() {}
    D explicit Left(const float (&c)[4]) {
        split(c[0], big[0], small[0]);
        split(c[2], big[1], small[1]);
        split(c[1], big[2], small[2]);
        split(c[3], big[3], small[3]);
    }
};

// The transpose of an 8 x 8 block of a square in shared memory, as the right operand.
struct Right {
    u32 big[2], small[2];
    D Right(const float* block, int g, int q) {
        const float2 pair = *reinterpret_cast<const float2*>(block + g * MS + 2 * q);
        split(pair.x, big[0], small[0]);
        split(pair.y, big[1], small[1]);
    }
};

template <int N> struct Constant { static constexpr int value = N; };

// body(first, count) for tiles FIRST .. LAST - 1 in groups, whose first tile is in use.
template <int FIRST, int LAST, int SIZE, class InUse, class Body> D void groups(const InUse& in_use, const Body& body) {
    if constexpr (FIRST < LAST) {
        if (in_use(FIRST)) body(Constant<FIRST>(), Constant<at_most(SIZE, LAST - FIRST)>());
        groups<FIRST + SIZE, LAST, SIZE>(in_use, body);
    }
}

// The gated norm of rows of outputs: LANES lanes a row, each with PARTS times EACH adjacent elements.
struct Gated {
    static constexpr int LANES = QT == 1 ? 32 : 8;
    static constexpr int EACH = at_most(8, DV / LANES), PARTS = DV / LANES / EACH;
    float weight[PARTS][EACH];
    u32 z[PARTS][EACH / 2];
    const u16* from;
    i64 row;

    D Gated(const Arguments& p, i64 batch, int head, int warp, int lane) {
        if constexpr (NORM) {
            from = p.z + batch * p.z_stride + head * DV;
            row = p.z_row;
            if (QT == 1) load_weight(p, lane), load(warp, T, lane);
            else
                for (int line = threadIdx.x; line < T * (DV / 64); line += THREADS)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line / (DV / 64) * row + line % (DV / 64) * 64));
        }
    }

    D void load_weight(const Arguments& p, int lane) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int first = (part * LANES + lane % LANES) * EACH;
#if WEIGHT32
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                const float2 two = *reinterpret_cast<const float2*>(static_cast<const float*>(p.weight) + first + e);
                weight[part][e] = two.x, weight[part][e + 1] = two.y;
            }
#else
            u32 pairs[EACH / 2];
            vector(pairs, static_cast<const u16*>(p.weight) + first);
#pragma unroll
            for (int e = 0; e < EACH; e += 2) weight[part][e] = low(pairs[e / 2]), weight[part][e + 1] = high(pairs[e / 2]);
#endif
        }
    }

    D void load(int r, int T, int lane) {
        if (r < T)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) vector(z[part], from + r * row + (part * LANES + lane % LANES) * EACH);
    }

    D static void vector(u32 (&to)[EACH / 2], const u16* from) {
        if constexpr (EACH == 2) to[0] = *reinterpret_cast<const u32*>(from);
        else if constexpr (EACH == 4) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            to[0] = two.x, to[1] = two.y;
        } else {
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
verify(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap state) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = address(shared);
    float* const M = reinterpret_cast<float*>(shared + AT_M); // -L below the diagonal blocks, (I + L)^-1 in them
    float* const A = reinterpret_cast<float*>(shared + AT_A); // what queries take of w
    float2* const gates = reinterpret_cast<float2*>(shared + AT_GATES);
    float2* const c = reinterpret_cast<float2*>(shared + AT_C);
    float4* const key_rows = reinterpret_cast<float4*>(shared + AT_KEYROWS);
    float2* const query_rows = reinterpret_cast<float2*>(shared + AT_QROWS);
    const u64* const masks = reinterpret_cast<u64*>(shared + AT_MASKS);

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, q = lane % 4;
    const u32 state_there = base + AT_BARRIER;
    constexpr int WARP_ROWS = DV / WARPS;
    const int v0 = warp * WARP_ROWS;

    const int head = blockIdx.x, key_head = head / (p.HV / p.H);
    const i64 batch = blockIdx.y;

    // 1. Ask for everything, each thing as soon as its address is known; first for what others wait for.
    if (tid == 0) open(state_there);
    after_launch_before();
    const int slot = (int)p.slots[batch];
    const i64 request = p.requests[batch];
    const int n = T ? p.rows[batch] : 0;
    u16* const out = p.out + (batch * T * p.HV + head) * DV;
    const int out_row = p.HV * DV;
    if (slot < 0) {
        for (int to = tid; to < T * (DV / 8); to += THREADS)
            *reinterpret_cast<uint4*>(out + to / (DV / 8) * (i64)out_row + to % (DV / 8) * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int own = p.pending[request * p.HV + head]; // less than P where the head has folded already
    const int2 looked_up = T ? p.places[batch] : make_int2(p.end[request], own);
    const int P = looked_up.y, joint = P + n;
    const int first = looked_up.x - P;
    const int longest = T ? p.longest[batch] : 0;
    float gate_a, gate_b, neg_A, dt_bias;
    if (tid < T) {
        copy<8>(base + AT_MASKS + tid * 8, p.ancestors + batch * T + tid);
        gate_a = element<GATES32>(p.a, batch * p.a_stride + tid * p.a_row + head);
        gate_b = element<GATES32>(p.b, batch * p.b_stride + tid * p.b_row + head);
        neg_A = p.neg_A[head], dt_bias = p.dt_bias[head];
    }
    constexpr int X_CHUNKS = DK / 8, V_CHUNKS = DV / 8;
    for (int r = tid / X_CHUNKS; r < T; r += THREADS / X_CHUNKS)
        copy<16>(base + AT_X + x_at(ROWS + r, tid % X_CHUNKS),
                 p.queries + ((batch * T + r) * p.H + key_head) * DK + tid % X_CHUNKS * 8);
    Gated gated(p, batch, head, warp, lane);
    const auto place = [&](int i) { // of joint row i in the ring
        int at = first + i;
        at = at < 0 ? at + p.ring : at;
        return request * p.ring + (at >= p.ring ? at - p.ring : at);
    };
    if (tid < P) copy<8>(base + AT_GATES + tid * 8, p.gates + place(tid) * p.HV + head);
#pragma unroll
    for (int i0 = 0; i0 < KR; i0 += THREADS / X_CHUNKS) {
        const int i = i0 + tid / X_CHUNKS;
        if (i >= joint) break;
        copy<16>(base + AT_X + x_at(i, tid % X_CHUNKS), p.keys + (place(i) * p.H + key_head) * DK + tid % X_CHUNKS * 8);
        if (X_CHUNKS == V_CHUNKS)
            copy<16>(base + AT_V + v_at(i, tid % V_CHUNKS), p.values + (place(i) * p.HV + head) * DV + tid % V_CHUNKS * 8);
    }
    if (X_CHUNKS != V_CHUNKS)
        for (int i = tid / V_CHUNKS; i < joint; i += THREADS / V_CHUNKS)
            copy<16>(base + AT_V + v_at(i, tid % V_CHUNKS), p.values + (place(i) * p.HV + head) * DV + tid % V_CHUNKS * 8);

    if (tid == 0) read_state(base + AT_S, state, head, slot, state_there);
    if (tid < n) {
        const float x = gate_a + dt_bias;
        const float log_decay = neg_A * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
        const float2 both = make_float2(log_decay < -1e3f ? -1e3f : log_decay, p.beta_scale / (1.0f + expf(-gate_b)));
        gates[P + tid] = both;
        p.gates[place(P + tid) * p.HV + head] = both;
    }
    wait_for_copies();
    if (tid < P - own) gates[tid] = make_float2(0.0f, 0.0f); // a row without effect
    __syncthreads();

    // 2. Norms, sums of decays along the paths: EACH_ROW lanes a row.
    constexpr int EACH_ROW = XT > 4 ? 4 : 8;
    for (int at = tid; at < ((joint + n) * EACH_ROW + 31) / 32 * 32; at += THREADS) {
        const int x = at / EACH_ROW, part = at % EACH_ROW;
        const bool is_key = x < joint, is_query = !is_key && x < joint + n;
        const int i = is_query ? x - n : min(x, joint - 1); // row of the joint system
        const int row = is_query ? ROWS + x - joint : i;
        float four[4] = {};
#pragma unroll
        for (int chunk = 0; chunk < DK / 8; chunk += EACH_ROW) {
            const uint4 eight = *reinterpret_cast<const uint4*>(shared + AT_X + x_at(row, chunk + part));
            const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] += low(pairs[e]) * low(pairs[e]) + high(pairs[e]) * high(pairs[e]);
        }
        float squares = (four[0] + four[1]) + (four[2] + four[3]);
        const Mask path = i < P ? 0 : (Mask)masks[i - P];
        double sum = 0.0;
        if constexpr (KT <= 3) {
#pragma unroll
            for (int j0 = 0; j0 < KR; j0 += EACH_ROW) {
                const int j = j0 + part;
                const bool above = j < P ? j <= i : path >> (j - P & 31) & 1;
                sum += j < joint && above ? gates[j].x : 0.0f;
            }
        } else {
#pragma unroll 1
            for (int j = part; j < min(i + 1, P); j += EACH_ROW) sum += gates[j].x;
            Mask rest = path; // each lane takes every EACH_ROW-th bit that is set
#pragma unroll
            for (int skip = 1; skip < EACH_ROW; ++skip) rest = part >= skip ? rest & (rest - 1) : rest;
#pragma unroll 1
            while (rest) {
                sum += gates[P + __ffsll(rest) - 1].x;
#pragma unroll
                for (int skip = 0; skip < EACH_ROW; ++skip) rest &= rest - 1;
            }
        }
#pragma unroll
        for (int step = 1; step < EACH_ROW; step *= 2) {
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        const float scale = rsqrtf(squares + p.eps), from_state = expf((float)sum);
        if (part == 0 && is_key) {
            const float beta = gates[i].y;
            c[i] = make_float2((float)sum, (float)(sum - (float)sum));
            key_rows[i] = make_float4(beta * scale, from_state * scale, -beta * scale * scale, 0.0f);
        }
        if (part == 0 && is_query) {
            const float rho = scale * rsqrtf((float)DK);
            query_rows[x - joint] = make_float2(rho, rho * from_state);
        }
    }
    __syncthreads();

    // 3. Products of the rows with each other.
    const int key_tiles = (joint + 7) / 8;
    constexpr int X_TILES = (XT + 1) / 2, WIDE = KT > 3 ? 2 : 1; // tiles of 8 columns of a product
    for (int unit = warp; unit < X_TILES * ((key_tiles + WIDE - 1) / WIDE); unit += WARPS) {
        const int x0 = unit % X_TILES * 16, j0 = unit / X_TILES * (8 * WIDE);
        const bool of_keys = x0 < min(joint, KR) && j0 <= x0 + 15;
        const bool of_queries = x0 + 15 >= KR && max(x0 - KR, 0) < n;
        if (!of_keys && !of_queries) continue;
        float sum[WIDE][2][4] = {};
        const int a_row = memory_row(min(x0 + lane % 16, 8 * XT - 1));
#pragma unroll
        for (int k = 0; k < DK / 32; ++k) {
            u32 left[2][4];
#pragma unroll
            for (int step = 0; step < 2; ++step) load4(left[step], base + AT_X + x_at(a_row, 4 * k + 2 * step + lane / 16));
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                u32 right[4];
                load4(right, base + AT_X + x_at(j0 + 8 * w + lane % 8, 4 * k + lane / 8));
                product16(sum[w][0], left[0], right[0], right[1]);
                product16(sum[w][1], left[1], right[2], right[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int x = x0 + g + 8 * half;
            const bool is_key = x < KR;
            const int r = is_key ? x - P : x - KR; // row of the tree, below 0 where pending
            const int i = min(P + r, KR - 1);
            const bool valid = i < joint && r < n;
            const Mask path = r < 0 ? 0 : (Mask)masks[min(r, QR - 1)] & ~((Mask)is_key << r);
            const float2 c_i = c[i];
            const float factor = is_key ? key_rows[i].z : query_rows[min(max(r, 0), QR - 1)].x;
            float* const to = is_key ? M + x * MS : A + (x - KR) * MS;
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                const int j = j0 + 8 * w + 2 * q;
                if (j >= KR) continue;
                const float4 c_j = *reinterpret_cast<const float4*>(c + j);
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = j + e;
                    const bool above =
                        column < P ? r >= 0 || column < x : path >> (column - P & (int)(8 * sizeof(Mask) - 1)) & 1;
                    const float ratio = expf((c_i.x - (e ? c_j.z : c_j.x)) + (c_i.y - (e ? c_j.w : c_j.y)));
                    const float dot = sum[w][0][2 * half + e] + sum[w][1][2 * half + e];
                    value[e] = valid && above && column < joint ? dot * ratio * factor : 0.0f;
                }
                if (is_key || r < T) *reinterpret_cast<float2*>(to + j) = make_float2(value[0], value[1]);
            }
        }
    }
    __syncthreads();

    // 4. Inverses of the diagonal blocks, column by column.
    if (const int block = tid / 8, column = tid % 8; warp * 4 < key_tiles) {
        float* const square = M + min(block, KT - 1) * (8 * MS + 8);
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = i == column;
#pragma unroll
            for (int j = 0; j < i; ++j) x[i] += square[i * MS + j] * x[j];
        }
        __syncwarp();
        if (block < key_tiles)
#pragma unroll
            for (int i = 0; i < 8; ++i) square[i * MS + column] = x[i];
    }

    // 5. Products of the state with the rows: 16 dv rows by 8 rows a tile; keys first, then queries.
    wait(state_there);
    float tile[MT][XT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int x = 0; x < XT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) tile[m][x][e] = 0.0f;
    const auto in_use = [&](int x) { return x < KT ? 8 * x < joint : 8 * (x - KT) < n; };
    constexpr int TOGETHER = 4; // tiles without a branch between them
#pragma unroll(XT > 4 || STATE32 ? 1 : 2)
    for (int k = 0; k < DK / 32; ++k) {
#if STATE32
        u32 big[MT][4][4], small[MT][4][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 pair = *reinterpret_cast<const float2*>(
                        shared + AT_S + s_at(v0 + 16 * m + g + 8 * half, 8 * k + 2 * step + q / 2) + q % 2 * 8);
                    split(pair.x, big[m][step][half], small[m][step][half]);
                    split(pair.y, big[m][step][half + 2], small[m][step][half + 2]);
                }
#else
        u32 left[MT][2][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load4(left[m][step], base + AT_S + s_at(v0 + 16 * m + lane % 16, 4 * k + 2 * step + lane / 16));
#endif
        const auto multiply = [&](auto x0, auto count) {
            u32 right[count.value][4];
#pragma unroll
            for (int x = 0; x < count.value; ++x)
                load4(right[x], base + AT_X + x_at(memory_row(8 * (x0.value + x)) + lane % 8, 4 * k + lane / 8));
#pragma unroll
            for (int step = 0; step < (STATE32 ? 4 : 2); ++step)
#pragma unroll
                for (int x = 0; x < count.value; ++x)
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
#if STATE32
                        const u32 r0 = __float_as_uint(low(right[x][step])), r1 = __float_as_uint(high(right[x][step]));
                        product32(tile[m][x0.value + x], small[m][step], r0, r1);
                        product32(tile[m][x0.value + x], big[m][step], r0, r1);
#else
                        product16(tile[m][x0.value + x], left[m][step], right[x][2 * step], right[x][2 * step + 1]);
#endif
                    }
        };
        if constexpr (XT <= TOGETHER) multiply(Constant<0>(), Constant<XT>());
        else groups<0, KT, TOGETHER>(in_use, multiply), groups<KT, XT, TOGETHER>(in_use, multiply);
    }

    // 6. Right sides, then forward substitution by blocks.
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        if (!in_use(x)) continue;
        u32 v[2 * MT];
        const u32 from = base + AT_V + v_at(8 * x + lane % 8, v0 / 8 + lane / 8 % (2 * MT));
        load_transposed(v, from);
        const float4 even = key_rows[8 * x + 2 * q], odd = key_rows[8 * x + 2 * q + 1];
        const bool has_even = 8 * x + 2 * q < joint, has_odd = 8 * x + 2 * q + 1 < joint;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* const e = tile[m][x] + 2 * half;
                e[0] = has_even ? even.x * (low(v[2 * m + half]) - even.y * e[0]) : 0.0f;
                e[1] = has_odd ? odd.x * (high(v[2 * m + half]) - odd.y * e[1]) : 0.0f;
            }
    }
    __syncthreads(); // inverses are there; queries and values are used up
    constexpr int LANES = Gated::LANES, EACH = Gated::EACH, PARTS = Gated::PARTS;
    const int first_row = warp * (32 / LANES) + lane / LANES;
    if (NORM && QT > 1) gated.load_weight(p, lane), gated.load(first_row, T, lane);
#pragma unroll
    for (int x = KT; x < XT; ++x) {
        const int r = 8 * (x - KT) + 2 * q;
        const float even = r < n ? query_rows[r].y : 0.0f, odd = r + 1 < n ? query_rows[r + 1].y : 0.0f;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            tile[m][x][0] *= even, tile[m][x][1] *= odd, tile[m][x][2] *= even, tile[m][x][3] *= odd;
        }
    }
    const auto solve = [&](auto x_, auto) {
        constexpr int x = x_.value;
        Left w[MT];
        {
            const Right inverse(M + 8 * x * (MS + 1), g, q);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const Left right_side(tile[m][x]);
                float solved[4] = {}, rest[4] = {};
                product32(solved, right_side.big, inverse.big[0], inverse.big[1]);
                product32(rest, right_side.small, inverse.big[0], inverse.big[1]);
                product32(rest, right_side.big, inverse.small[0], inverse.small[1]);
#pragma unroll
                for (int e = 0; e < 4; ++e) tile[m][x][e] = solved[e] + rest[e];
                w[m] = Left(tile[m][x]);
            }
        }
        const auto subtract = [&](auto y0, auto count) {
#pragma unroll
            for (int y = y0.value; y < y0.value + count.value; ++y) {
                const Right square(y < KT ? M + 8 * y * MS + 8 * x : A + 8 * (y - KT) * MS + 8 * x, g, q);
#pragma unroll
                for (int m = 0; m < MT; ++m) product32(tile[m][y], w[m].small, square.big[0], square.big[1]);
#pragma unroll
                for (int m = 0; m < MT; ++m) product32(tile[m][y], w[m].big, square.small[0], square.small[1]);
#pragma unroll
                for (int m = 0; m < MT; ++m) product32(tile[m][y], w[m].big, square.big[0], square.big[1]);
            }
        };
        if constexpr (XT <= TOGETHER) subtract(Constant<x + 1>(), Constant<XT - x - 1>());
        else groups<x + 1, KT, TOGETHER>(in_use, subtract), groups<KT, XT, TOGETHER>(in_use, subtract);
    };
    groups<0, KT, 1>(in_use, solve);

    // 7. Outputs, turned over in shared memory; a warp normalises and writes whole rows.
    float* const turned = reinterpret_cast<float*>(shared + AT_OUT);
#pragma unroll
    for (int x = KT; x < XT; ++x)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 8 * (x - KT) + 2 * q + e % 2;
                if (r < n) turned[r * OS + v0 + 16 * m + g + 8 * (e / 2)] = tile[m][x][e];
            }
    __syncthreads();
    for (int r = first_row; r / (32 / LANES) * (32 / LANES) < T; r += WARPS * (32 / LANES)) {
        float o[PARTS][EACH];
        float squares = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                const float2 two = *reinterpret_cast<const float2*>(
                    turned + min(r, T - 1) * OS + (part * LANES + lane % LANES) * EACH + e);
                o[part][e] = r < n ? two.x : 0.0f;
                o[part][e + 1] = r < n ? two.y : 0.0f;
                squares += o[part][e] * o[part][e] + o[part][e + 1] * o[part][e + 1];
            }
        if (NORM) {
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
            const float scale = rsqrtf(squares / DV + p.norm_eps);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int e = 0; e < EACH; e += 2) {
                    const u32 pair = gated.z[part][e / 2];
                    const float z0 = low(pair), z1 = high(pair);
                    const float gate0 = __fdividef(z0, 1.0f + __expf(-z0)), gate1 = __fdividef(z1, 1.0f + __expf(-z1));
                    o[part][e] = r < n ? o[part][e] * scale * gated.weight[part][e] * gate0 : 0.0f;
                    o[part][e + 1] = r < n ? o[part][e + 1] * scale * gated.weight[part][e + 1] * gate1 : 0.0f;
                }
        }
        if (NORM) gated.load(r + WARPS * (32 / LANES), T, lane);
        if (r < T)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32* const to = reinterpret_cast<u32*>(out + r * (i64)out_row + (part * LANES + lane % LANES) * EACH);
                u32 pairs[EACH / 2];
#pragma unroll
                for (int e = 0; e < EACH; e += 2) pairs[e / 2] = pack(o[part][e], o[part][e + 1]);
                if constexpr (EACH == 2) *to = pairs[0];
                else if constexpr (EACH == 4) *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
                else *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
    }

    // 8. Fold.
    if (own == 0 || !(p.fold_always || own + longest > p.capacity)) return;
    const float2 last = c[P - 1];
    const float decay = expf(last.x + last.y);
    const auto until_last = [&](int j) { return j < P ? expf((last.x - c[j].x) + (last.y - c[j].y)) : 0.0f; };
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        const int j = 8 * x + 2 * q;
        const float even = until_last(j), odd = until_last(j + 1);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            tile[m][x][0] *= even, tile[m][x][1] *= odd, tile[m][x][2] *= even, tile[m][x][3] *= odd;
        }
    }
#pragma unroll 2
    for (int k = 0; k < DK / 32; ++k) {
        float sum[MT][4][4]; // four tiles of 8 columns
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int v = v0 + 16 * m + g + 8 * half;
#if STATE32
                    const float2 pair = *reinterpret_cast<const float2*>(
                        shared + AT_S + s_at(v, 8 * k + 2 * part + q / 2) + q % 2 * 8);
                    sum[m][part][2 * half] = decay * pair.x, sum[m][part][2 * half + 1] = decay * pair.y;
#else
                    const u32 pair = *reinterpret_cast<const u32*>(shared + AT_S + s_at(v, 4 * k + part) + 4 * q);
                    sum[m][part][2 * half] = decay * low(pair), sum[m][part][2 * half + 1] = decay * high(pair);
#endif
                }
#pragma unroll
        for (int x = 0; x < KT; ++x) {
            if (8 * x >= P) continue;
            u32 right[4];
            load_transposed(right, base + AT_X + x_at(8 * x + lane % 8, 4 * k + lane / 8));
            const bool has_even = 8 * x + 2 * q < P, has_odd = 8 * x + 2 * q + 1 < P;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const Left w(tile[m][x]);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const u32 r0 = has_even ? __float_as_uint(low(right[part])) : 0;
                    const u32 r1 = has_odd ? __float_as_uint(high(right[part])) : 0;
                    product32(sum[m][part], w.small, r0, r1);
                    product32(sum[m][part], w.big, r0, r1);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int v = v0 + 16 * m + g + 8 * half;
#if STATE32
                    *reinterpret_cast<float2*>(shared + AT_S + s_at(v, 8 * k + 2 * part + q / 2) + q % 2 * 8)
                        = make_float2(sum[m][part][2 * half], sum[m][part][2 * half + 1]);
#else
                    *reinterpret_cast<u32*>(shared + AT_S + s_at(v, 4 * k + part) + 4 * q)
                        = pack(sum[m][part][2 * half], sum[m][part][2 * half + 1]);
#endif
                }
    }
    before_copy_engine();
    __syncthreads();
    if (tid == 0) {
        p.pending[request * p.HV + head] = 0;
        write_state(state, head, slot, base + AT_S);
    }
}
