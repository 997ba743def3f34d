/* append_tokens.cuh - the tokens of a thread block that appends or seals: their rows, their pages,
 * and refused rows. Kernels for codes of one channel and of several channels share it. */
#pragma once

#include "pack.cuh"

namespace kvant
{

/* The most tokens of a page that are written code by code. With more, writing whole words is
 * faster. */
constexpr int FEW_TOKENS = 6;

/* The first part of a block's shared memory. */
struct BlockTokens {
    uint16_t scale[PAGE_TOKENS], zero[PAGE_TOKENS];
    int64_t slot[PAGE_TOKENS]; /* negative: no token */
    PageTokens page_tokens;
    uint32_t whole[2], single[2]; /* bit i: token i represents its page, or is written alone */
};

/* Reports why rows are refused, and removes them from the block's tokens. This is rare, so the rows
 * are loaded again. */
template <int D>
__device__ __noinline__ void refuse(const AppendArgs &args, const AppendRole &role,
                                    BlockTokens &tokens, bool refused, uint32_t chunk_at, int token,
                                    size_t row_at, int kv_head, int lane)
{
    constexpr int LANES = Lanes<D>::LANES;
    float x[16] = {};
    if (refused && lane % LANES < Lanes<D>::TILES)
        load_centered<D>(x, args, role, row_at, kv_head, lane % LANES);
    bool finite = true;
    for (int i = 0; i < 16; i++)
        finite &= is_finite(x[i]);
    __syncwarp(); /* other lanes have read the slot */
    uint32_t all = __ballot_sync(FULL, finite), row = ((1u << LANES) - 1) << lane / LANES * LANES;
    if (refused && lane % LANES == 0) {
        note_refusal(args, chunk_at + token, tokens.slot[token], (all & row) == row);
        tokens.slot[token] = -1;
    }
}

/* The address of a token's row: in the call's rows, or in an open page that is sealed. */
KVANT_INLINE size_t row_place(const AppendArgs &args, const AppendRole &role, uint32_t chunk_at,
                              int token, int kv_head)
{
    const size_t of_head = kv_head * role.row_head_stride;
    const uint32_t at = chunk_at + token;
    if (args.row_ids) {
        const int64_t row = args.row_ids[at];
        return of_head + row / PAGE_TOKENS * role.row_block_stride +
               row % PAGE_TOKENS * role.token_stride;
    }
    return args.from ? of_head + args.from[at / PAGE_TOKENS] * role.row_block_stride +
                           at % PAGE_TOKENS * role.token_stride
                     : of_head + at * role.token_stride;
}

/* The slot of token `at` of the call; below 0: none. */
KVANT_INLINE int64_t slot_at(const AppendArgs &args, uint32_t at)
{
    const uint32_t block = at / PAGE_TOKENS, token = at % PAGE_TOKENS;
    if (at >= args.n_tokens)
        return -1;
    if (!args.from)
        return args.slots[at];
    const bool there = args.from[block] >= 0 && args.to[block] >= 0 &&
                       (!args.tokens || (int)token < args.tokens[block]);
    return there ? (int64_t)args.to[block] * PAGE_TOKENS + token : -1;
}

/* The rows of a call. */
KVANT_INLINE uint32_t row_count(const AppendArgs &args)
{
    return args.n_rows ? min(args.n_tokens, *args.n_rows) : args.n_tokens;
}

KVANT_INLINE int64_t slot_of(const AppendArgs &args, uint32_t first, uint32_t chunk)
{
    return threadIdx.x < chunk && first + threadIdx.x < row_count(args)
               ? slot_at(args, first + threadIdx.x)
               : -1;
}

/* The number of a slot's page. A shift rounds down, so a negative slot has the page of no other
 * slot. */
KVANT_INLINE int64_t page_number(int64_t slot)
{
    return slot >> 6;
}

KVANT_INLINE uint8_t *page_of(const AppendRole &role, const BlockTokens &tokens, int token,
                              int kv_head)
{
    return role.base + (size_t)page_number(tokens.slot[token]) * role.block_stride +
           kv_head * role.head_stride;
}

/* Finds the tokens at each place of the page of token `leader`. */
KVANT_INLINE void place_tokens(BlockTokens &tokens, int leader)
{
    const int i = threadIdx.x;
    __syncthreads(); /* the tokens of the preceding page are not used any more */
    if (i < PAGE_TOKENS)
        tokens.page_tokens.at[i] = NONE;
    __syncthreads();
    if (i < PAGE_TOKENS && page_number(tokens.slot[i]) == page_number(tokens.slot[leader]))
        tokens.page_tokens.at[tokens.slot[i] % PAGE_TOKENS] = (uint8_t)i;
    __syncthreads();
}

/* Sorts the block's tokens. Pages with many of them are written page by page; all other tokens are
 * written one by one. */
KVANT_INLINE void count_pages(BlockTokens &tokens, int n_slots)
{
    const int i = threadIdx.x;
    const int64_t slot = i < PAGE_TOKENS ? tokens.slot[i] : -1;
    const int n_tokens = __syncthreads_count(slot >= 0);
    /* a whole page of a prompt is the usual case and needs no counting */
    const bool one_page =
        __syncthreads_and(slot < 0 || page_number(slot) == page_number(tokens.slot[0]));
    if (i >= PAGE_TOKENS)
        return;
    int count = 0;
    bool first = slot >= 0;
    if (one_page) {
        first = i == 0 && n_tokens > 0;
        count = slot >= 0 ? n_tokens : 0;
    } else
#pragma unroll 4
        for (int j = 0; slot >= 0 && j < n_slots; j++)
            if (page_number(tokens.slot[j]) == page_number(slot)) {
                first &= j >= i;
                count++;
            }
    uint32_t whole = __ballot_sync(FULL, first && count > FEW_TOKENS);
    uint32_t single = __ballot_sync(FULL, count > 0 && count <= FEW_TOKENS);
    if (i % 32 == 0)
        tokens.whole[i / 32] = whole, tokens.single[i / 32] = single;
}

/* Writes metadata and codes of all tokens, once all are quantised. All threads of a block of at
 * least 192 call it. It calls write_page(words) where the block has many tokens of a page. For each
 * remaining token, a warp calls write_token(token, its place, words). */
template <class Page, class Token>
KVANT_INLINE void write_block(BlockTokens &tokens, const AppendRole &role, int n_slots, int kv_head,
                              Page &&write_page, Token &&write_token)
{
    auto words_of = [&](int token) {
        return reinterpret_cast<uint32_t *>(page_of(role, tokens, token, kv_head));
    };
    count_pages(tokens, n_slots);
    const int own = (int)threadIdx.x - 128;
    if (own >= 0 && own < PAGE_TOKENS && tokens.slot[own] >= 0) {
        const int at = (int)(tokens.slot[own] % PAGE_TOKENS);
        uint16_t *numbers = reinterpret_cast<uint16_t *>(page_of(role, tokens, own, kv_head) +
                                                         role.codec.metadata_offset);
        numbers[at] = tokens.scale[own];
        if (role.codec.codes == KVANT_CUDA_CODES_UNIFORM && !role.codec.symmetric)
            numbers[PAGE_TOKENS + at] = tokens.zero[own];
    }
    __syncthreads();
    for (int half = 0; half < 2; half++)
        for (uint32_t left = tokens.whole[half]; left; left &= left - 1) {
            const int leader = 32 * half + __ffs((int)left) - 1;
            place_tokens(tokens, leader);
            write_page(words_of(leader));
        }
    for (int t = threadIdx.x >> 5; t < PAGE_TOKENS; t += blockDim.x / 32)
        if (tokens.single[t / 32] >> t % 32 & 1)
            write_token(t, (int)(tokens.slot[t] % PAGE_TOKENS), words_of(t));
}

/* Whether rows begin at multiples of 16 bytes. */
inline bool is_wide(const AppendRole &role, kvant_cuda_type type)
{
    size_t unit = type == KVANT_CUDA_F32 ? 4 : 8; /* numbers in 16 bytes */
    return reinterpret_cast<uintptr_t>(role.rows) % 16 == 0 && role.token_stride % unit == 0 &&
           role.row_head_stride % unit == 0 && role.row_block_stride % unit == 0;
}

/* Tokens per block. A decode step, or sealing a page or two, has few tokens; then a block gets few
 * of them, so that many multiprocessors work. */
inline uint32_t tokens_a_block(const AppendArgs &args)
{
    return args.n_tokens <= 512 ? 8 : PAGE_TOKENS;
}

/* Makes the arguments of a launch; book_of returns a codec's book. */
template <class Book, class F>
BookedAppendArgs<Book> booked(const AppendArgs &args, int n_roles, F &&book_of)
{
    BookedAppendArgs<Book> p{};
    static_cast<AppendArgs &>(p) = args;
    p.chunk = tokens_a_block(args);
    for (int i = 0; i < n_roles; i++) {
        p.roles[i].wide = is_wide(args.roles[i], args.type);
        p.books[i] = book_of(*args.roles[i].source);
    }
    return p;
}

inline dim3 grid_of(const AppendArgs &args, int n_roles, int n_kv_heads)
{
    return dim3((args.n_tokens + args.chunk - 1) / args.chunk, n_kv_heads, n_roles);
}

} // namespace kvant
