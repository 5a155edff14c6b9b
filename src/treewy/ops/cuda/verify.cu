// The verify kernel: all of a window but its commit, one launch a layer.
//
// One block takes one value head of one request. Rows of its window: P pending ones (a chain), then the n of the tree.
// The tree's rows meet themselves, their nearest ancestors and the committed inputs in the convolution, then SiLU; keys k
// and values v of the pending rows went through it in earlier rounds and are kept in a ring, where those of the tree go
// now. With kappa = 1/|k|, rho = 1/|q|, c = log decays summed along the path (fp64, so that differences of large sums keep
// their digits; in this file they are binary) and w = kappa u:
//
//     (I + L) w = r,   r = b (v - exp(c) kappa S k)    b = beta kappa,  L[i,j] = b_i kappa_i exp(c_i - c_j) k_i.k_j,  j above i
//     o = exp(c) rho' S q + A w      A[i,j] = rho'_i exp(c_i - c_j) q_i.k_j,  j above i or i,   rho' = rho / sqrt(dk)
//     fold: S <- exp(c_P) S + sum over pending j of exp(c_P - c_j) w_j k_j^T
//
// What makes it fast
//   * Bytes. The state is read once, and written in a fold only; else outputs, and what ring and stash take of the window. A
//     pending row is its inputs, 12 KiB a layer at 32 heads of 128; an fp32 pseudo-value with its key would be 20 KiB, read
//     every round and written once more. Up to 8 rows, queries never leave the SM.
//   * Bytes in flight. The state comes by the tensor copy engine, 32 KiB (bf16) by one thread, in the permutation that the
//     matrix unit's loads want, and up to five blocks an SM wait for theirs while others compute. The small rows are asked
//     for first, and a 16-bit state when those of the asking warp are there, which has no part in a convolution: behind the states
//     of all blocks rows would come last, and everything starts with them. The convolution runs while pending rows travel.
//   * The matrix unit. dv is M, rows of the window are N, in steps of 8, so a window of 4 rows is not padded to 16 or 64.
//     16-bit keys, queries and states are multiplied as they are: exact products, fp32 sums.
//   * Rows are solved once the state is there: forward substitution by blocks of 8, on the matrix unit, by each warp for its
//     part of dv, so no warp waits for another; TF32 with both operands split in two, error about 2^-21 of the terms; beside fp32
//     states bf16 with both in three, 2^-24. A fold needs them anyway, in an outer product with keys in which w has 24 or 22 bits.
//     A w, which only outputs see, may be of halves of 16 bits, error 2^-16 of its terms.
//   * Accumulators of one product are, register by register, the operand of the next.
//
// Joint rows are numbered so that the tree's begin at W0, whatever is pending: pending ones end there.
//
// Compiled with: DK, DV (64, 128, 256); WINDOW (rows, 0 for a fold alone); ROWS (capacity of the history + WINDOW); CONV
// (width of the convolution, 0 where it has run already); BF16 (else fp16); STATE32; NORM; GATES32, WEIGHT32 (a and b, the
// norm's weight, are fp32).

#include <hardware.cuh>

struct Arguments {
    const u16* x;         // [B, T, C], read if CONV
    const u16* conv;      // [slots, CONV - 1, C], likewise
    u16* window_inputs;   // [R, max_rows, C], written if CONV
    int* window_rows;     // [R], likewise
    const float* taps;    // [CONV, C]
    const float* bias;    // [C] or null
    const int* conv_ancestors; // [B, T, CONV - 1]
    const u16* queries;   // [B, T, H, DK], read if not CONV
    const int2* places;   // [B] end, most pending rows of a head; likewise
    u16* keys;            // [R, ring, H, DK]
    u16* values;          // [R, ring, HV, DV]
    float2* gates;        // [R, ring, HV] log decay, beta
    const void* a;        // [B, T, HV]
    const void* b;
    const u16* z;         // [B, T, HV, DV], read if NORM
    const void* weight;   // [DV], read if NORM
    u16* out;             // [B, T, HV, DV]
    const int* end;       // [R]
    int* pending;         // [R, HV]
    const i64* slots;     // [B]
    const i64* requests;  // [B]
    const int* rows;      // [B]
    const u64* ancestors; // [B, T]
    const int* longest;   // [B]
    const float* neg_A;   // [HV]
    const float* dt_bias; // [HV]
    i64 x_stride, x_row, conv_stride, a_stride, a_row, b_stride, b_row, z_stride, z_row;
    int max_rows, ring, capacity, H, HV, fold_always;
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
constexpr int KR = 8 * KT, QR = 8 * QT, XT = T ? KT + QT : KT;
constexpr int W0 = KR - T, SHIFT = KR - ROWS; // the tree's first joint row; joint rows that nobody has room for
template <bool WIDE> struct MaskOf { using type = u64; };
template <> struct MaskOf<false> { using type = u32; };
using Mask = MaskOf<(QT > 4)>::type;         // ancestors of a row
constexpr bool HALVES = KT > 4 || STATE32;   // outputs take solved rows and A in halves of 16 bits
constexpr int MS = KR % 16 ? KR : KR + 8;    // row stride of squares; 8 or 24 mod 32: no bank conflicts of pairs
// M's rows of a tile, no longer than they must be: nothing stands above the diagonal.
constexpr int stride_of(int tile) { return 8 * ((tile + 1) | 1); }
constexpr int rows_before(int tile) { return tile * (tile + 2) / 2 * 64; }
constexpr int OS = DV + 4;                   // row stride of the outputs
constexpr int STATE_BYTES = STATE32 ? 4 : 2;
using State = Tile<DV, DK, STATE_BYTES>; // of a head
// Bytes of a row in shared memory. Eight adjacent rows of a chunk lie in different banks: rows are padded, or their chunks
// permuted, which takes instructions and makes room for another block: in windows of up to 8 rows beside fp32 states, in wider
// ones up to 32 joint rows.
constexpr bool PADDED = QT == 1 ? !STATE32 : KT > 4;
constexpr int X_ROW = DK * 2 + 16 * PADDED, V_ROW = DV * 2 + 16 * PADDED;

constexpr int later(int at, int bytes) { return at + (bytes + 15) / 16 * 16; }
// The state; keys, then queries; values; squares; what is known of rows.
constexpr int AT_S = 0;
constexpr int AT_BARRIER = DV * DK * STATE_BYTES;
constexpr int AT_X = AT_BARRIER + 16;
constexpr int AT_V = later(AT_X, (ROWS + T) * X_ROW);
constexpr int AT_OUT = AT_X + ROWS * X_ROW; // in the place of queries and values, when these are used up
constexpr int AT_M = at_least(later(AT_V, ROWS * V_ROW), later(AT_OUT, T * OS * 4));
constexpr int AT_A = later(AT_M, rows_before(KT) * 4);
constexpr int AT_C = later(AT_A, T * MS * 4);        // float2: c, in two parts
constexpr int AT_KEYROWS = later(AT_C, KR * 8);      // float4: b, exp(c) kappa, -b kappa, exp(c_P - c) in a fold
constexpr int AT_QROWS = later(AT_KEYROWS, KR * 16); // float2: rho', exp(c) rho'
constexpr int KEPT = at_least(0, CONV - 1), CHANNELS = 2 * DK + DV; // committed inputs; channels of a head
constexpr int APART = KEPT && STATE32; // the oldest of them is in registers, where room is scarce
constexpr int AT_COMMITTED = AT_M;     // the others, until the convolution is over
// float2: log decay, beta
constexpr int AT_GATES = at_least(later(AT_QROWS, T * 8), later(AT_COMMITTED, (KEPT - APART) * CHANNELS * 2));
constexpr int AT_MASKS = later(AT_GATES, KR * 8);
constexpr int AT_SQUARES = later(AT_MASKS, T * 8);   // float: of queries and keys, where they were convolved
// A tile past the last row reads what follows, into columns of nobody.
constexpr int SHARED = at_least(later(AT_SQUARES, CONV ? at_least(2, DK / 64) * T * 4 : 0),
                                at_least(AT_X + (ROWS + QR) * X_ROW, T ? AT_A + (QR - 1) * MS * 4 + (KT + KT % 2) * 32 : 0));

// Blocks that an SM is to hold: as many as fit its shared memory, with the registers that accumulators or convolution need.
constexpr int REGISTERS = at_most(255, at_least(72 + 4 * MT * XT, CONV ? 46 + 10 * T : 0));
#ifndef BLOCKS
constexpr int BLOCKS = at_least(1, at_most(228 * 1024 / ((SHARED + 127) / 128 * 128 + 1024), 65536 / (THREADS * REGISTERS)));
#endif
extern "C" __constant__ const int launch_bounds[2] = {THREADS, SHARED};

// Where rows are: keys first, in tiles; then queries, in tiles. Where a byte of a row, or its 16 bytes `chunk`, are.
D int joint_row(int i) { return SHIFT ? max(i - SHIFT, 0) : i; }
D int memory_row(int x) { return x < KR ? joint_row(x) : x - KR + ROWS; }
D int permuted(int row, int byte) { return PADDED ? byte : byte ^ (row & 7) << 4; }
D int x_at(int row, int chunk) { return row * X_ROW + permuted(row, chunk * 16); }
D int v_at(int row, int chunk) { return row * V_ROW + permuted(row, chunk * 16); }

// Four adjacent channels of a head's query, key and value, which stand side by side in this order.
struct Piece {
    int part, offset, channel; // the last in the layer
    D Piece() {}
    D Piece(const Arguments& p, int head, int key_head, int index) {
        part = index < DK / 4 ? 0 : index < DK / 2 ? 1 : 2;
        offset = index * 4 - part * DK;
        channel = once((part == 2 ? 2 * p.H * DK + head * DV : (part * p.H + key_head) * DK) + offset);
    }
    D int at(int r) const { // of row r of the tree, in shared memory
        const int row = part ? ROWS - T + r : ROWS + r;
        return (part == 2 ? AT_V + row * V_ROW : AT_X + row * X_ROW) + permuted(row, offset * 2);
    }
};

// The matrix unit cuts its sums, always towards zero. Beside states of fp32 sums of a few products are therefore made from zero
// and added up here, where they are rounded.
D void add_up(float (&c)[4], const float (&sum)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] += sum[e];
}

// An fp32 number as two of TF32, which the matrix unit cuts to their upper 19 bits. Cut, x = big + small (1 + 2^-10). Of
// a state of fp32 both are rounded, the small one nearly; every fourth number loses its last bit.
D void split(float x, u32& big, u32& small) {
    constexpr u32 HALF = STATE32 ? 0x1000u : 0;
    constexpr float ABOUT_HALF = STATE32 ? 1.0f + 0.7f / 2048 : 1.0f; // of the last bit; a factor, so that NaN stays NaN
    big = __float_as_uint(x) + HALF & 0xffffe000u;
    small = __float_as_uint((x - __uint_as_float(big)) * ABOUT_HALF);
}

// The pair of bf16 next to two fp32 numbers, which is taken off them: the third leaves nothing.
D u32 piece_of(float (&two)[2]) {
    const u32 pair = pack_bf16(two[0], two[1]);
    two[0] -= __uint_as_float(pair << 16), two[1] -= __uint_as_float(pair & 0xffff0000u);
    return pair;
}
// Two fp32 numbers as two such pairs: x = big + small (1 + 2^-8).
D void halve(float x, float y, u32& big, u32& small) {
    float two[2] = {x, y};
    big = piece_of(two), small = pack_bf16(two[0], two[1]);
}

// A tile of accumulators, 16 dv rows by 8 rows, as the left operand of the next product; an 8 x 8 block as the right one, its
// rows 2 q and 2 q + 1, of one column; c = a b or c += a b, in fp32 quality. Keys that repeat each other make much of what is
// lost: beside states of fp32 operands keep every bit.
#if STATE32
// Three pieces of bf16. The matrix unit takes 16 columns, and so two products at a time.
struct Right {
    u32 piece[3];
    D Right() {}
    D Right(float x, float y) {
        float two[2] = {x, y};
#pragma unroll
        for (u32& pair : piece) pair = piece_of(two);
    }
};
struct Left {
    Right row[2]; // g, g + 8
    D Left() {}
    D explicit Left(const float (&c)[4]) : row{Right(c[0], c[1]), Right(c[2], c[3])} {}
};
D void set_product(float (&c)[4], const Left& a, const Right& b) {
    const auto add = [&](int a0, int b0, int a1, int b1) { // products of pieces; those left out are below 2^-24
        const u32 left[4] = {a.row[0].piece[a0], a.row[1].piece[a0], a.row[0].piece[a1], a.row[1].piece[a1]};
        product_halves(c, left, b.piece[b0], b.piece[b1]);
    };
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    add(0, 2, 2, 0), add(0, 1, 1, 0), add(1, 1, 0, 0);
}
D void add_product(float (&c)[4], const Left& a, const Right& b) {
    float sum[4];
    set_product(sum, a, b);
    add_up(c, sum);
}
#else
// Two parts of TF32. The matrix unit's k-th column is row 2k of the tile for k < 4 and row 2 (k - 4) + 1 above, on both sides
// of the product.
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
struct Right {
    u32 big[2], small[2];
    D Right(float x, float y) { split(x, big[0], small[0]), split(y, big[1], small[1]); }
};
D void set_product(float (&c)[4], const Left& a, const Right& b) {
    float rest[4] = {};
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    product32(c, a.big, b.big[0], b.big[1]);
    product32(rest, a.small, b.big[0], b.big[1]);
    product32(rest, a.big, b.small[0], b.small[1]);
    add_up(c, rest);
}
D void add_product(float (&c)[4], const Left& a, const Right& b) {
    product32(c, a.small, b.big[0], b.big[1]);
    product32(c, a.big, b.small[0], b.small[1]);
    product32(c, a.big, b.big[0], b.big[1]);
}
#endif

template <int N> struct Constant { static constexpr int value = N; };

// body(first, count) for tiles FIRST .. LAST - 1 in groups.
template <int FIRST, int LAST, int SIZE, class Body> D void groups(const Body& body) {
    if constexpr (FIRST < LAST) {
        body(Constant<FIRST>(), Constant<at_most(SIZE, LAST - FIRST)>());
        groups<FIRST + SIZE, LAST, SIZE>(body);
    }
}

// 2^x for x up to 0; 0 below 2^-126. Beside states of fp32 within a unit of the last place, by a polynomial: the machine's own
// is off by two, and where keys repeat each other such errors add up.
D float decay(float x) {
    if (!STATE32) return power2(x);
    const float shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f); // 1.5 2^23, so the integer next to x ends its bits
    float power = 1.534581242e-4f;
    power = fmaf(power, f, 1.339993090e-3f);
    power = fmaf(power, f, 9.618489072e-3f);
    power = fmaf(power, f, 5.550328642e-2f);
    power = fmaf(power, f, 2.402264625e-1f);
    power = fmaf(power, f, 6.931471825e-1f);
    power = fmaf(power, f, 1.0f);
    return x < -126.0f ? 0.0f : power * __uint_as_float(__float_as_uint(shifted) + 127 << 23);
}

D float add_squares(u32 pair, float sum) { return fmaf(high(pair), high(pair), fmaf(low(pair), low(pair), sum)); }

// The gated norm of rows of outputs: LANES lanes a row, each with PARTS times EACH adjacent elements.
struct Gated {
    static constexpr int LANES = QT == 1 ? 32 : 8;
    static constexpr int EACH = at_most(4, DV / LANES), PARTS = DV / LANES / EACH;
    float weight[PARTS][EACH];
    u32 z[PARTS][EACH / 2];
    float gate[PARTS][EACH]; // weight silu(z)
    const u16* from;
    i64 row;

    D Gated(const Arguments& p, int batch, int head, int warp, int lane) {
        if constexpr (NORM) {
            from = p.z + batch * p.z_stride + head * DV;
            row = p.z_row;
            if (QT == 1) load_weight(p, lane), load(warp, T, lane);
            else
                for (int line = threadIdx.x; line < T * (DV / 64); line += THREADS)
                    prefetch(from + line / (DV / 64) * row + line % (DV / 64) * 64);
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

    D void weigh() {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                gate[part][e] = weight[part][e] * silu(low(z[part][e / 2]));
                gate[part][e + 1] = weight[part][e + 1] * silu(high(z[part][e / 2]));
            }
    }

    D static void vector(u32 (&to)[EACH / 2], const u16* from) {
        if constexpr (EACH == 2) to[0] = *reinterpret_cast<const u32*>(from);
        else {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            to[0] = two.x, to[1] = two.y;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
verify(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap state) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = address(shared);
    float* const M = reinterpret_cast<float*>(shared + AT_M); // -L below the diagonal; inverses of the blocks on it
    float* const A = reinterpret_cast<float*>(shared + AT_A); // A, or its halves
    float2* const gates = reinterpret_cast<float2*>(shared + AT_GATES);
    float2* const c = reinterpret_cast<float2*>(shared + AT_C);
    float4* const key_rows = reinterpret_cast<float4*>(shared + AT_KEYROWS);
    float2* const query_rows = reinterpret_cast<float2*>(shared + AT_QROWS);
    const u64* const masks = reinterpret_cast<u64*>(shared + AT_MASKS);
    float* const squares = reinterpret_cast<float*>(shared + AT_SQUARES);

    const int tid = threadIdx.x % THREADS, warp = tid / 32, lane = tid % 32, g = lane / 4, q = lane % 4; // known not to be negative
    const u32 state_there = base + AT_BARRIER;
    constexpr int WARP_ROWS = DV / WARPS;
    const int v0 = warp * WARP_ROWS;

    const int key_head = blockIdx.y, head = key_head * gridDim.x + blockIdx.x;
    const int batch = blockIdx.z;
    const int channels = 2 * p.H * DK + p.HV * DV;

    // The thread that asks for the state, and opens its barrier: of a warp that waits for rows only, if there is one.
    const bool asks = tid == (CONV && !STATE32 ? THREADS - 32 : 0);
    if (asks) open(state_there);

    // 1. Ask for everything but a 16-bit state, each thing as soon as its address is known; first for what others wait for. A
    // thread of the convolution has four channels, whose inputs only it reads.
    constexpr int PIECES = CONV ? CHANNELS / 4 : 0, EACH_THREAD = (PIECES + THREADS - 1) / THREADS;
    Piece pieces[at_least(1, EACH_THREAD)];
#pragma unroll
    for (int j = 0; j < EACH_THREAD; ++j) pieces[j] = Piece(p, head, key_head, tid + j * THREADS);
    // Pieces of this thread: body(which of them, its index in the block, piece).
    const auto each_piece = [&](const auto& body) {
#pragma unroll
        for (int j = 0; j < EACH_THREAD; ++j)
            if (const int index = tid + j * THREADS; index < PIECES) body(j, index, pieces[j]);
    };
    constexpr int MET = at_least(1, KEPT);
    float4 taps[at_least(1, EACH_THREAD)][MET + 1];
    uint2 oldest[at_least(1, EACH_THREAD)]; // of the committed inputs, if apart: only the last tap meets it
    int codes[at_least(1, T)][MET]; // rows that a row meets before itself
    constexpr int CODES = T * KEPT;
    int mine[at_least(1, (CODES + 31) / 32)]; // codes i + lane, for all lanes where the window is no chain
    // Parameters go into the L2, which sees what a launch before this one may still write; for all requests by the first.
    if (batch == 0)
        each_piece([&](int, int, Piece piece) {
#pragma unroll
            for (int step = 0; step < CONV; ++step) prefetch(p.taps + step * channels + piece.channel);
        });
    after_launch_before();
    constexpr bool LOOKED_UP = T && !CONV; // where the window begins, and the most pending rows of a head
    const int slot = (int)p.slots[batch], request = (int)p.requests[batch];
    const int n = T ? p.rows[batch] : 0;
    int longest = T && !STATE32 ? p.longest[batch] : 0;
    const int2 looked_up = LOOKED_UP ? p.places[batch] : make_int2(0, 0);
    u16* const out = p.out + (i64)(batch * T * p.HV + head) * DV;
    const int out_row = p.HV * DV;
    // Nobody, which slot alone would say; all of them stand here to be waited for together.
    if (slot < 0 || request < 0 || n < 0 || longest < 0 || looked_up.y < 0) {
#pragma unroll 1
        for (int to = tid; to < T * (DV / 8); to += THREADS)
            *reinterpret_cast<uint4*>(out + to / (DV / 8) * (i64)out_row + to % (DV / 8) * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int P = load_now(p.pending + request * p.HV + head);
    const int most = LOOKED_UP ? looked_up.y : P, end = LOOKED_UP ? looked_up.x : load_now(p.end + request);
    each_piece([&](int j, int index, Piece piece) {
        const u16* const x = p.x + batch * p.x_stride + piece.channel;
        const u16* const kept = p.conv + slot * p.conv_stride + piece.channel;
        if (APART) oldest[j] = *reinterpret_cast<const uint2*>(kept);
#pragma unroll
        for (int i = APART; i < KEPT; ++i)
            copy<8>(base + AT_COMMITTED + (i - APART) * (CHANNELS * 2) + index * 8, kept + i * channels);
#pragma unroll
        for (int r = 0; r < T; ++r) copy<8>(base + piece.at(r), x + r * p.x_row);
#pragma unroll
        for (int step = 0; step < CONV; ++step)
            taps[j][step] = *reinterpret_cast<const float4*>(p.taps + step * channels + piece.channel);
    });
    close_group();
#pragma unroll
    for (int i = 0; i < CODES; i += 32) mine[i / 32] = p.conv_ancestors[batch * CODES + min(i + lane, CODES - 1)];
    // Places in the ring: of joint row i, which is pending; of row r of the tree.
    const auto pending_place = [&](int i) { return end + i - W0 + (end + i < W0 ? p.ring : 0); };
    const auto tree_place = [&](int r) { return end + r - (end + r >= p.ring ? p.ring : 0); };
    const int key_row = p.H * DK, value_row = p.HV * DV;
    const int ring_rows = request * p.ring;
    u16* const keys = once(p.keys + (i64)ring_rows * key_row + key_head * DK);
    u16* const values = once(p.values + (i64)ring_rows * value_row + head * DV);
    float2* const ring_gates = once(p.gates + (i64)ring_rows * p.HV + head);
    const int hi = W0 + n; // the first joint row that is not
    {
        const int from = W0 - most, to = CONV ? W0 : hi;
        const auto place = [&](int i) { return i < W0 ? pending_place(i) : tree_place(i - W0); };
        constexpr int X_CHUNKS = DK / 8, V_CHUNKS = DV / 8;
#pragma unroll
        for (int i0 = 0; i0 < W0; i0 += THREADS)
            if (const int i = from + i0 + tid; i < W0) copy<8>(base + AT_GATES + i * 8, ring_gates + pending_place(i) * p.HV);
#pragma unroll
        for (int i0 = 0; i0 < KR; i0 += THREADS / X_CHUNKS) {
            const int i = from + i0 + tid / X_CHUNKS;
            if (i >= to) {
                if (!CONV && i < KR)
                    *reinterpret_cast<uint4*>(shared + AT_X + x_at(i - SHIFT, tid % X_CHUNKS)) = make_uint4(0, 0, 0, 0);
                continue;
            }
            const int at = place(i);
            copy<16>(base + AT_X + x_at(i - SHIFT, tid % X_CHUNKS), keys + at * key_row + tid % X_CHUNKS * 8);
            if (X_CHUNKS == V_CHUNKS)
                copy<16>(base + AT_V + v_at(i - SHIFT, tid % V_CHUNKS), values + at * value_row + tid % V_CHUNKS * 8);
        }
        if (X_CHUNKS != V_CHUNKS)
            for (int i = from + tid / V_CHUNKS; i < to; i += THREADS / V_CHUNKS)
                copy<16>(base + AT_V + v_at(i - SHIFT, tid % V_CHUNKS), values + place(i) * value_row + tid % V_CHUNKS * 8);
#pragma unroll
        for (int r0 = 0; !CONV && r0 < T; r0 += THREADS / X_CHUNKS)
            if (const int r = r0 + tid / X_CHUNKS; r < T)
                copy<16>(base + AT_X + x_at(ROWS + r, tid % X_CHUNKS),
                         p.queries + (i64)((batch * T + r) * p.H + key_head) * DK + tid % X_CHUNKS * 8);
    }
    const int gate_row = THREADS - 1 - tid; // the last warp convolves least
    float gate_a, gate_b, neg_A, dt_bias;
    if (gate_row < T) {
        copy<8>(base + AT_MASKS + gate_row * 8, p.ancestors + batch * T + gate_row);
        gate_a = element<GATES32>(p.a, batch * p.a_stride + gate_row * p.a_row + head);
        gate_b = element<GATES32>(p.b, batch * p.b_stride + gate_row * p.b_row + head);
        neg_A = p.neg_A[head], dt_bias = p.dt_bias[head];
    }
    close_group();
    Gated gated(p, batch, head, warp, lane);
    const int lo = W0 - P; // the first joint row that is
    // The state, which is needed last: asked for early it would keep the rows of other blocks waiting. One of fp32 is so large
    // that it is late as it is; it waits for one answer more, so that rows are ahead: of a plan, no longest path is below 0.
    if (T && STATE32) longest = load_now(p.longest + batch);
    if (STATE32 && asks && longest >= 0) State::read(base + AT_S, state, head, slot, state_there);
    const bool folds = P && (p.fold_always || P + longest > p.capacity);
    if (gate_row < n) {
        const float x = gate_a + dt_bias;
        const float log_decay = neg_A * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
        const float2 both = make_float2(log_decay < -1e3f ? -1e3f : log_decay, p.beta_scale / (1.0f + expf(-gate_b)));
        gates[W0 + gate_row] = both;
        ring_gates[tree_place(gate_row) * p.HV] = both;
    }
    if (CONV && head == 0 && tid == 0) p.window_rows[request] = n;

    // 2. The convolution, in place: a thread has read all inputs of its channels before it writes. Sums of their squares.
    const bool chain = longest == n; // rows meet those before them; of other trees, whom their codes name
    if (!chain)
#pragma unroll
        for (int i = 0; i < CODES; ++i) codes[i / MET][i % MET] = __shfl_sync(0xffffffffu, mine[i / 32], i % 32);
    if (CONV) wait_for_first_group();
    each_piece([&](int j, int index, Piece piece) {
        float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (p.bias) bias = *reinterpret_cast<const float4*>(p.bias + piece.channel);
        uint2 input[at_least(1, T)], made[at_least(1, T)];
        float sums[at_least(1, T)][4];
        const auto at = [&](int code) {
            const int from = code >= 0 ? piece.at(code) : AT_COMMITTED + (KEPT - APART + code) * (CHANNELS * 2) + index * 8;
            return *reinterpret_cast<const uint2*>(shared + from);
        };
        const auto meet = [&](float(&sum)[4], int step, uint2 met) {
            sum[0] += low(met.x) * taps[j][step].x, sum[1] += high(met.x) * taps[j][step].y;
            sum[2] += low(met.y) * taps[j][step].z, sum[3] += high(met.y) * taps[j][step].w;
        };
#pragma unroll
        for (int r = 0; r < T; ++r) {
            input[r] = at(r);
            sums[r][0] = bias.x, sums[r][1] = bias.y, sums[r][2] = bias.z, sums[r][3] = bias.w;
            meet(sums[r], 0, input[r]);
        }
        if (chain) {
            uint2 kept[MET];
#pragma unroll
            for (int i = 0; i < KEPT; ++i) kept[i] = i < APART ? oldest[j] : at(i - KEPT);
#pragma unroll
            for (int step = 1; step < CONV; ++step)
#pragma unroll
                for (int r = 0; r < T; ++r) meet(sums[r], step, r >= step ? input[at_least(r - step, 0)] : kept[KEPT + r - step]);
        } else {
#pragma unroll
            for (int r = 0; r < T; ++r)
#pragma unroll
                for (int step = 1; step < CONV; ++step) {
                    const int code = r < n ? codes[r][step - 1] : -1;
                    uint2 met = at(code);
                    if (APART && step == KEPT) // what was read is no input, if the code is the oldest's
                        met.x = code > -KEPT ? met.x : oldest[j].x, met.y = code > -KEPT ? met.y : oldest[j].y;
                    meet(sums[r], step, met);
                }
        }
#pragma unroll
        for (int r = 0; r < T; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[r][e] = silu(sums[r][e]);
            made[r] = r < n ? make_uint2(pack(sums[r][0], sums[r][1]), pack(sums[r][2], sums[r][3])) : make_uint2(0, 0);
        }
#pragma unroll
        for (int r = 0; r < T; ++r) *reinterpret_cast<uint2*>(shared + piece.at(r)) = made[r];
        if (piece.part == 2 || blockIdx.x == 0) { // the first value head keeps its group's keys and inputs
            u16* const stash = once(p.window_inputs + (i64)(request * p.max_rows) * channels + piece.channel);
            u16* const ring = once((piece.part == 2 ? values : keys) + piece.offset);
            const int ring_row = once(piece.part == 2 ? value_row : key_row);
#pragma unroll
            for (int r = 0; r < T; ++r) {
                if (r >= n) continue;
                store8(stash + r * channels, input[r]);
                if (piece.part) store8(ring + tree_place(r) * ring_row, made[r]);
            }
        }
        if (index < 2 * DK / 4) {
            constexpr int LANES = at_most(32, DK / 4); // of a warp, in a row
            static_assert(!CONV || T <= LANES, "a lane writes the sum of a row");
            constexpr int SUMS = T > 4 ? 8 : T > 2 ? 4 : at_least(1, T);
            float of_squares[SUMS];
#pragma unroll
            for (int r = 0; r < SUMS; ++r) {
                const uint2 two = r < T ? made[at_most(r, T - 1)] : make_uint2(0, 0);
                of_squares[r] = add_squares(two.x, add_squares(two.y, 0.0f));
            }
            // A lane passes on half of its rows' sums, until it has one.
#pragma unroll
            for (int step = LANES / 2, left = SUMS / 2; step; step /= 2, left /= 2) {
                if (left == 0) of_squares[0] += __shfl_xor_sync(0xffffffffu, of_squares[0], step);
#pragma unroll
                for (int r = 0; r < left; ++r) {
                    const bool upper = lane & step;
                    const float passed = upper ? of_squares[r] : of_squares[r + left];
                    of_squares[r] = (upper ? of_squares[r + left] : of_squares[r]) + __shfl_xor_sync(0xffffffffu, passed, step);
                }
            }
            const int r = lane % LANES / (LANES / SUMS);
            if (r < T) squares[(piece.part * (DK / 4 / LANES) + piece.offset / (4 * LANES)) * T + r] = of_squares[0];
        }
    });
    wait_for_copies();
    if (!STATE32 && asks) State::read(base + AT_S, state, head, slot, state_there);
    __syncthreads();

    // 3. What is known of a row: its norms, the sum of decays along its path. EACH_ROW lanes a row.
    constexpr int EACH_ROW = KR * 8 <= THREADS ? 8 : 4;
    if (tid < T - n) c[hi + tid] = make_float2(0.0f, 0.0f), key_rows[hi + tid] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int at0 = 0; at0 < KR * EACH_ROW; at0 += THREADS) {
        const int at = at0 + tid;
        if (at - lane >= (hi - lo) * EACH_ROW) continue;
        const int i = min(lo + at / EACH_ROW, hi - 1), r = i - W0, part = at % EACH_ROW;
        const auto sum_of_squares = [&](int row) {
            float four[4] = {};
#pragma unroll
            for (int chunk = 0; chunk < DK / 8; chunk += EACH_ROW) {
                const uint4 eight = *reinterpret_cast<const uint4*>(shared + AT_X + x_at(row, chunk + part));
                const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) four[e] = add_squares(pairs[e], four[e]);
            }
            return (four[0] + four[1]) + (four[2] + four[3]);
        };
        float of_key = 0.0f, of_query = 0.0f;
        if (!CONV || r < 0) of_key = sum_of_squares(i - SHIFT);
        if (!CONV && r >= 0) of_query = sum_of_squares(ROWS + r);
        double decays = 0.0;
#pragma unroll(W0 > 32 ? 2 : 8)
        for (int j0 = 0; j0 < W0; j0 += EACH_ROW)
            if (const int j = lo + j0 + part; j <= min(i, W0 - 1)) decays += gates[j].x;
        const Mask path = r < 0 ? 0 : (Mask)masks[r];
#pragma unroll
        for (int j = 0; j < T; j += EACH_ROW) decays += path >> (j + part) & 1 && j + part < T ? gates[W0 + j + part].x : 0.0f;
#pragma unroll
        for (int step = 1; step < EACH_ROW; step *= 2) {
            decays += __shfl_xor_sync(0xffffffffu, decays, step);
            of_key += __shfl_xor_sync(0xffffffffu, of_key, step);
            if (!CONV) of_query += __shfl_xor_sync(0xffffffffu, of_query, step);
        }
        if (part || lo + at / EACH_ROW >= hi) continue;
        if (CONV && r >= 0)
#pragma unroll
            for (int piece = 0; piece < at_least(1, DK / 128); ++piece) {
                of_query += squares[piece * T + r];
                of_key += squares[(at_least(1, DK / 128) + piece) * T + r];
            }
        decays *= 1.4426950408889634; // to base 2
        float kappa = rsqrtf(of_key + p.eps);
        if (STATE32) kappa = fmaf(0.5f * kappa, fmaf(-(of_key + p.eps) * kappa, kappa, 1.0f), kappa); // to its last bit
        const float beta = gates[i].y, from_state = decay((float)decays);
        c[i] = make_float2((float)decays, (float)(decays - (float)decays));
        key_rows[i] = make_float4(beta * kappa, from_state * kappa, -beta * kappa * kappa, 0.0f);
        if (r >= 0) {
            const float rho = rsqrtf(of_query + p.eps) * rsqrtf((float)DK);
            query_rows[r] = make_float2(rho, rho * from_state);
        }
    }
    __syncthreads();

    // 4. Products of the rows with each other, 16 rows by 8 to 32 columns a warp; zero, where rows are not related. In wider windows
    // they are not made where none of the 16 has an ancestor in the columns.
    const auto keys_in_use = [&](int first, int last) { return 8 * last > lo && 8 * first < hi; };
    if (folds && tid < P) {
        const float2 from = c[lo + tid], to = c[W0 - 1];
        key_rows[lo + tid].w = decay((to.x - from.x) + (to.y - from.y));
    }
    constexpr int X_TILES = (XT + 1) / 2, WIDE = KT > 3 ? 4 : CONV && KT == 2 ? 2 : 1;
    for (int unit = warp; unit < X_TILES * ((KT + WIDE - 1) / WIDE); unit += WARPS) {
        // Back and forth, so that who has more to do first has less then: keys come first, and have fewer columns.
        const int group = KT > WIDE ? unit / X_TILES : 0, at = unit - group * X_TILES;
        const int x0 = 16 * (group % 2 ? X_TILES - 1 - at : at), j0 = 8 * WIDE * group;
        const bool of_keys = x0 < min(hi, KR) && x0 + 15 >= lo && j0 <= x0 + 15;
        const bool of_queries = x0 + 15 >= KR && max(x0 - KR, 0) < n;
        constexpr int USED = HALVES ? at_least(2, WIDE) : WIDE; // tiles that are read at a time, so both must be written
        if (!keys_in_use(j0 / (8 * USED) * USED, j0 / (8 * USED) * USED + USED) || !of_keys && !of_queries) continue;
        const int row = min(x0 + lane % 16, 8 * XT - 1);
        u32 related = 0; // bit i: column j0 + i is an ancestor of this row, or of a query its own key
        if (const int r = row - (row < KR ? W0 : KR); r < n) {
            const int first = max(lo - j0, 0), end = min(max(W0 + min(r, 0) - j0, 0), 32);
            if (first < end) related = ~0u >> (32 - (end - first)) << first;
            if (T && r >= 0) {
                const Mask path = (Mask)masks[r] ^ (Mask)(row < KR) << r;
                related |= j0 > W0 ? (u32)(path >> max(j0 - W0, 0)) : W0 - j0 < 32 ? (u32)path << max(W0 - j0, 0) : 0;
            }
        }
        if (QT > 1 && !__any_sync(0xffffffffu, related != 0)) {
            const int tile = row / 8, r = row - KR; // 16 bytes at a time of M's row, or A's
            float4* const to = reinterpret_cast<float4*>(r < 0 ? M + rows_before(tile) + row % 8 * stride_of(tile) + j0 : A + r * MS + j0);
#pragma unroll
            for (int four = lane / 16; four < 2 * WIDE; four += 2)
                if (j0 / 4 + four < (r < 0 ? 2 * tile + 2 : KR / 4) && r < T) to[four] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            continue;
        }
        float sum[WIDE][2][4] = {};
#pragma unroll
        for (int k = 0; k < DK / 32; ++k) {
            u32 left[2][4];
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load4(left[step], base + AT_X + x_at(memory_row(row), 4 * k + 2 * step + lane / 16));
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                u32 right[4];
                load4(right, base + AT_X + x_at(joint_row(min(j0 + 8 * w, KR - 8) + lane % 8), 4 * k + lane / 8));
                if constexpr (STATE32) {
                    float part[2][4] = {};
                    product16(part[0], left[0], right[0], right[1]);
                    product16(part[1], left[1], right[2], right[3]);
                    add_up(sum[w][0], part[0]), add_up(sum[w][1], part[1]);
                } else {
                    product16(sum[w][0], left[0], right[0], right[1]);
                    product16(sum[w][1], left[1], right[2], right[3]);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 mine = __shfl_sync(0xffffffffu, related, 8 * half + g) >> 2 * q;
            const int tile = x0 / 8 + half;
            const bool of_key = tile < KT;
            const int r = 8 * tile + g - (of_key ? W0 : KR);
            if (r >= T) continue;
            const float2 c_i = c[W0 + r];
            const float factor = of_key ? key_rows[W0 + r].z : query_rows[r].x;
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                const int j = j0 + 8 * w + 2 * q;
                if (KT % WIDE && j >= KR || of_key && j0 / 8 + w > tile) continue;
                const float4 c_j = *reinterpret_cast<const float4*>(c + j);
                const float even = decay(fminf((c_i.x - c_j.x) + (c_i.y - c_j.y), 0.0f));
                const float odd = decay(fminf((c_i.x - c_j.z) + (c_i.y - c_j.w), 0.0f));
                const float* const s0 = sum[w][0] + 2 * half;
                const float* const s1 = sum[w][1] + 2 * half;
                const float2 pair = make_float2(mine >> 8 * w & 1 ? (s0[0] + s1[0]) * (even * factor) : 0.0f,
                                                mine >> 8 * w & 2 ? (s0[1] + s1[1]) * (odd * factor) : 0.0f);
                if (of_key) *reinterpret_cast<float2*>(M + rows_before(tile) + g * stride_of(tile) + j) = pair;
                else if (HALVES) { // of a tile first the large ones
                    u32* const to = reinterpret_cast<u32*>(A + r * MS) + j - q;
                    halve(pair.x, pair.y, to[0], to[4]);
                } else *reinterpret_cast<float2*>(A + r * MS + j) = pair;
            }
        }
    }
    __syncthreads();

    // 5. Inverses of the diagonal blocks of I + L, in their place, a column a thread.
    if (warp >= WARPS - (KT + 3) / 4) {
        const int inverse_tile = (THREADS - 1 - tid) / 8, column = (THREADS - 1 - tid) % 8;
        const int in_tile = min(inverse_tile, KT - 1), stride = stride_of(in_tile);
        float* const diagonal = M + rows_before(in_tile) + 8 * in_tile;
        float solved[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            solved[i] = i == column;
#pragma unroll
            for (int j = 0; j < i; ++j) solved[i] += diagonal[i * stride + j] * solved[j];
        }
        __syncwarp();
        if (inverse_tile < KT)
#pragma unroll
            for (int i = 0; i < 8; ++i) diagonal[i * stride + column] = solved[i];
    }

    // 6. Products of the state with the rows: 16 dv rows by 8 rows a tile; keys first, then queries.
    if (NORM && QT == 1) gated.weigh();
    wait(state_there);
    float tile[MT][XT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int x = 0; x < XT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) tile[m][x][e] = 0.0f;
    constexpr int TOGETHER = XT > 8 ? 6 : 4; // tiles whose rows are in registers at a time
#pragma unroll(XT > 8 || STATE32 ? 1 : XT > 4 ? 2 : 4)
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
                        shared + AT_S + State::at(v0 + 16 * m + g + 8 * half, 8 * k + 2 * step + q / 2) + q % 2 * 8);
                    split(pair.x, big[m][step][half], small[m][step][half]);
                    split(pair.y, big[m][step][half + 2], small[m][step][half + 2]);
                }
#else
        u32 left[MT][2][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load4(left[m][step], base + AT_S + State::at(v0 + 16 * m + lane % 16, 4 * k + 2 * step + lane / 16));
#endif
        const auto multiply = [&](auto x0, auto count) {
            u32 right[count.value][4];
#pragma unroll
            for (int x = 0; x < count.value; ++x)
                load4(right[x], base + AT_X + x_at(memory_row(8 * (x0.value + x) + lane % 8), 4 * k + lane / 8));
#if STATE32
            float sum[MT][count.value][4] = {}; // of keys
#endif
#pragma unroll
            for (int step = 0; step < (STATE32 ? 4 : 2); ++step)
#pragma unroll
                for (int x = 0; x < count.value; ++x)
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
#if STATE32
                        const u32 r0 = __float_as_uint(low(right[x][step])), r1 = __float_as_uint(high(right[x][step]));
                        float(&to)[4] = x0.value + x < KT ? sum[m][x] : tile[m][x0.value + x];
                        product32(to, small[m][step], r0, r1);
                        product32(to, big[m][step], r0, r1);
#else
                        product16(tile[m][x0.value + x], left[m][step], right[x][2 * step], right[x][2 * step + 1]);
#endif
                    }
#if STATE32
#pragma unroll
            for (int x = 0; x < at_most(count.value, KT - x0.value); ++x)
#pragma unroll
                for (int m = 0; m < MT; ++m) add_up(tile[m][x0.value + x], sum[m][x]);
#endif
        };
        groups<0, XT, TOGETHER>(multiply);
    }

    // 7. Right sides; solved rows, by forward substitution; what the state and they give to outputs.
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        u32 v[2 * MT];
        load_transposed(v, base + AT_V + v_at(joint_row(8 * x + lane % 8), v0 / 8 + lane / 8 % (2 * MT)));
        const int j = 8 * x + 2 * q;
        const float4 even = key_rows[j], odd = key_rows[j + 1];
        const bool has_even = j >= lo && j < hi, has_odd = j + 1 >= lo && j + 1 < hi;
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
        if (!keys_in_use(x, x + 1)) return;
        const int j = 8 * x + 2 * q;
        const float* const square = M + rows_before(x) + 8 * x;
        const float2 both = *reinterpret_cast<const float2*>(square + g * stride_of(x) + 2 * q);
        const Right inverse(both.x, both.y);
        Left w[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            set_product(tile[m][x], Left(tile[m][x]), inverse);
            w[m] = Left(tile[m][x]);
        }
        const auto subtract = [&](auto y, auto) {
            constexpr int tile_of = y.value < KT ? y.value : y.value - KT;
            const float2 pair = *reinterpret_cast<const float2*>(
                (y.value < KT ? M + rows_before(tile_of) + g * stride_of(tile_of) : A + (8 * tile_of + g) * MS) + j);
            const Right block(pair.x, pair.y);
#pragma unroll
            for (int m = 0; m < MT; ++m) add_product(tile[m][y.value], w[m], block);
        };
        groups<x + 1, HALVES ? KT : XT, 1>(subtract);
    };
    groups<0, KT, 1>(solve);
#pragma unroll
    for (int x = 0; T && HALVES && x < KT; x += 2) {
        if (!keys_in_use(x, x + 2)) continue;
        constexpr int LAST = KT - 1;
        u32 big[MT][4] = {}, small[MT][4] = {};
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (x + e / 2 > LAST) continue;
                const float* const pair = tile[m][at_most(x + e / 2, LAST)] + e % 2 * 2;
                halve(pair[0], pair[1], big[m][e], small[m][e]);
            }
        const auto take = [&](auto y0, auto count) {
            u32 right[count.value][4];
#pragma unroll
            for (int y = 0; y < count.value; ++y)
                load4(right[y], base + AT_A + (8 * (y0.value + y - KT) + lane % 8) * (MS * 4)
                                    + (x + lane / 8 % 2) * 32 + lane / 16 * 16);
#pragma unroll
            for (int term = 0; term < 3; ++term)
#pragma unroll
                for (int y = 0; y < count.value; ++y)
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        float(&o)[4] = tile[m][y0.value + y];
                        const u32(&r)[4] = right[y];
                        const u32(&l)[4] = term == 0 ? small[m] : big[m];
                        if (x < LAST) product_halves(o, l, r[term == 1 ? 2 : 0], r[term == 1 ? 3 : 1]);
                        else product_halves(o, l, r[term == 1 ? 2 : 0]);
                    }
        };
        groups<KT, XT, TOGETHER>(take);
    }

    // 8. Outputs, turned over in shared memory.
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
    // 9. Fold, where it is due: outer products of solved pending rows and keys. The state travels while outputs are made.
    if (folds) {
        constexpr int PT = (W0 + 7) / 8; // tiles that may hold pending rows
        const float2 last = c[W0 - 1];
        const float faded = decay(last.x + last.y);
#pragma unroll
        for (int x = 0; x < PT; ++x) {
            const int j = 8 * x + 2 * q;
            const bool has_even = j >= lo && j < W0, has_odd = j + 1 >= lo && j + 1 < W0;
            const float even = key_rows[j].w, odd = key_rows[j + 1].w;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                float(&e)[4] = tile[m][x];
                e[0] = has_even ? e[0] * even : 0.0f, e[1] = has_odd ? e[1] * odd : 0.0f;
                e[2] = has_even ? e[2] * even : 0.0f, e[3] = has_odd ? e[3] * odd : 0.0f;
            }
        }
        // Keys are multiplied as they are: beside bf16, w in three pieces of bf16, for two tiles of rows at a time; beside fp16,
        // whose range w may leave, in two of TF32, or for a state of fp32 in the three pieces too, and keys in two.
#if BF16 || STATE32
        constexpr int KEY_PIECES = BF16 ? 1 : 2;
        u32 w[MT][(PT + 1) / 2][3][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int x = 0; x < PT; ++x)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float two[2] = {tile[m][x][2 * half], tile[m][x][2 * half + 1]};
#pragma unroll
                    for (int piece = 0; piece < 3; ++piece) w[m][x / 2][piece][x % 2 * 2 + half] = piece_of(two);
                }
#endif
        // 16 columns of the state at a time; the next ones of 16 bits are asked for early, those of fp32 meet the sum at its end. A
        // thread's numbers are pairs of a row, and a warp's are 8 x 8 matrices for the instructions that move four.
        const auto pair_at = [&](int k, int m, int part, int half) {
            return AT_S + State::at(v0 + 16 * m + g + 8 * half, 4 * k + 2 * part + q / 2) + q % 2 * 8;
        };
        const auto matrices_at = [&](int k, int m) {
            return base + AT_S + State::at(v0 + 16 * m + lane % 16, 2 * k + lane / 16);
        };
        float2 pairs[MT][2][2]; // of fp32
        u32 matrices[MT][4];    // of 16 bits
        const auto load_state = [&](int k) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
                if (STATE32)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        pairs[m][e / 2][e % 2] = *reinterpret_cast<const float2*>(shared + pair_at(k, m, e / 2, e % 2));
                else load4(matrices[m], matrices_at(k, m));
        };
        if (!STATE32) load_state(0);
#pragma unroll 2
        for (int k = 0; k < DK / 16; ++k) {
            float sum[MT][2][4]; // two tiles of 8 columns
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[m][e / 2][e % 2 * 2] = STATE32 ? 0.0f : faded * low(matrices[m][e]);
                    sum[m][e / 2][e % 2 * 2 + 1] = STATE32 ? 0.0f : faded * high(matrices[m][e]);
                }
            load_state(STATE32 ? k : min(k + 1, DK / 16 - 1));
#pragma unroll
            for (int x = 0; x < PT; x += 2) {
                if (8 * x + 16 <= lo) continue;
                u32 factors[4]; // keys of two tiles of rows, by two of columns
                load_transposed(factors, base + AT_X + x_at(joint_row(8 * x + lane % 16), 2 * k + lane / 16));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int j = 8 * (x + e % 2) + 2 * q;
                    factors[e] &= (j >= lo && j < W0 ? 0xffffu : 0) | (j + 1 >= lo && j + 1 < W0 ? 0xffff0000u : 0);
                }
#if BF16 || STATE32
                u32 small[4]; // parts of fp16
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!BF16) halve(low(factors[e]), high(factors[e]), factors[e], small[e]);
#pragma unroll
                for (int both = 2; both >= 0; --both) // the number of a piece of w, and of one of the key
#pragma unroll
                    for (int of_key = 0; of_key < at_most(both + 1, KEY_PIECES); ++of_key)
#pragma unroll
                        for (int part = 0; part < 2; ++part)
#pragma unroll
                            for (int m = 0; m < MT; ++m) {
                                const u32(&of_w)[4] = w[m][x / 2][both - of_key];
                                const u32(&key)[4] = of_key ? small : factors;
                                const u32 even = key[2 * part], odd = key[2 * part + 1];
                                if (x + 1 < PT) product_halves(sum[m][part], of_w, even, odd);
                                else product_halves(sum[m][part], of_w, even);
                            }
#else
#pragma unroll
                for (int y = x; y < at_most(x + 2, PT); ++y)
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const Left w(tile[m][y]);
#pragma unroll
                        for (int part = 0; part < 2; ++part) {
                            const u32 two = factors[2 * part + y - x];
                            const u32 r0 = __float_as_uint(low(two)), r1 = __float_as_uint(high(two));
                            product32(sum[m][part], w.small, r0, r1);
                            product32(sum[m][part], w.big, r0, r1);
                        }
                    }
#endif
            }
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const float(&s)[2][4] = sum[m];
                if (STATE32)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float2 pair = pairs[m][e / 2][e % 2];
                        *reinterpret_cast<float2*>(shared + pair_at(k, m, e / 2, e % 2)) = make_float2(
                            faded * pair.x + s[e / 2][e % 2 * 2], faded * pair.y + s[e / 2][e % 2 * 2 + 1]);
                    }
                else
                    store4(matrices_at(k, m), pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]),
                           pack(s[1][2], s[1][3]));
            }
        }
        before_copy_engine();
    }
    __syncthreads();
    if (folds && tid == 0) {
        p.pending[request * p.HV + head] = 0;
        State::write(state, head, slot, base + AT_S);
    }

    // 10. A warp normalises and writes whole rows.
    for (int r = first_row; r / (32 / LANES) * (32 / LANES) < T; r += WARPS * (32 / LANES)) {
        float o[PARTS][EACH];
        float squares = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                const float2 two = *reinterpret_cast<const float2*>(
                    turned + min(r, T - 1) * OS + (part * LANES + lane % LANES) * EACH + e);
                o[part][e] = two.x, o[part][e + 1] = two.y;
                squares += two.x * two.x + two.y * two.y;
            }
        if (NORM) {
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
            const float scale = rsqrtf(squares / DV + p.norm_eps);
            if (QT > 1 || r != first_row) gated.weigh();
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int e = 0; e < EACH; ++e) o[part][e] *= scale * gated.gate[part][e];
        }
        if (NORM) gated.load(r + WARPS * (32 / LANES), T, lane);
        if (r < T)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32* const to = reinterpret_cast<u32*>(out + r * (i64)out_row + (part * LANES + lane % LANES) * EACH);
                u32 pairs[EACH / 2];
#pragma unroll
                for (int e = 0; e < EACH; e += 2) pairs[e / 2] = r < n ? pack(o[part][e], o[part][e + 1]) : 0;
                if constexpr (EACH == 2) *to = pairs[0];
                else *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
            }
    }
    if (folds && tid == 0) State::written();
}
