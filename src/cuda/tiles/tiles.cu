/* tiles.cu - chooses the shape of a tile kernel, and launches it. */
#include "tiles.h"

#include "../checks.h"
#include "../chunks/chunks.cuh"
#include "../trellis/trellis_pairs.cuh"
#include "unpack.cuh"

#include <algorithm>
#include <climits>
#include <iterator>

namespace kvant
{

size_t tile_workspace(uint32_t head_dim, uint32_t multiprocessors)
{
    return (size_t)multiprocessors * most_tile_rows(head_dim) * (head_dim + 2) * sizeof(float);
}

static TileKernel kernel_of(uint32_t head_dim)
{
    switch (head_dim) {
    case 64: return tile_kernel_of<64>();
    case 96: return tile_kernel_of<96>();
    case 128: return tile_kernel_of<128>();
    case 256: return tile_kernel_of<256>();
    default: return TileKernel{};
    }
}

/* unpack_*.cuh have what these tables hold. looks_up: the large ones of a trellis and of chunks, which have a
 * slower way without. */
template <class C> static int chunk_bytes(bool looks_up)
{
    if (C::CHANNELS == 3)
        return C::ENTRIES * 8 * (looks_up ? tile_copies<C>() : 1) + 32; /* norms */
    return looks_up ? (C::ENTRIES * 8 + 15) / 16 * 16 : 0;
}

static int table_bytes_of(const kvant_cuda_params &codec, bool looks_up)
{
    switch (codec.kind) {
    case KVANT_CUDA_OCTOPUS2: return chunk_bytes<Octopus2>(looks_up);
    case KVANT_CUDA_OCTOPUS3: return chunk_bytes<Octopus3>(looks_up);
    case KVANT_CUDA_OCTOPUS4: return chunk_bytes<Octopus4>(looks_up);
    case KVANT_CUDA_HQMQ_S96R4: return chunk_bytes<HqmqS96R4>(looks_up);
    case KVANT_CUDA_HQMQ_S192R6: return chunk_bytes<HqmqS192R6>(looks_up);
    case KVANT_CUDA_CODEBOOK_WIDE: return 4 << codec.bits;
    default: break;
    }
    if (codec.codes != KVANT_CUDA_CODES_TRELLIS)
        return 0;
    if (!looks_up)
        return (int)(KVANT_CUDA_TRELLIS_LEVELS * 4 + 4 * codec.head_dim);
    return codec.bits == 2   ? pair_bytes<Trellis2, false, false>()
           : codec.bits == 3 ? pair_bytes<Trellis3, false, false>()
                             : pair_bytes<Trellis4, false, false>();
}

static void choose_table(TileCodec &codec, bool looks_up)
{
    const kvant_cuda_params &p = codec.params;
    codec.looks_up = looks_up && (p.codes != KVANT_CUDA_CODES_TRELLIS || p.memory == Trellis4::MEMORY);
    codec.table_bytes = table_bytes_of(p, codec.looks_up);
}

/* Keys and values have the same table. */
static bool share_table(const TileCodec &a, const TileCodec &b)
{
    return a.params.kind == b.params.kind && a.looks_up == b.looks_up &&
           (a.params.codes == KVANT_CUDA_CODES_TRIPLETS ||
            (a.params.codes == KVANT_CUDA_CODES_TRELLIS && a.looks_up));
}

static TileCodec tile_codec(const kvant_cuda_codec &codec)
{
    TileCodec c{};
    c.params = codec.params;
    c.trellis = codec.trellis;
    c.index_bits = codec.book.index_bits;
    std::copy(std::begin(codec.book.direction), std::end(codec.book.direction), c.directions.direction);
    std::copy(std::begin(codec.book.norm), std::end(codec.book.norm), c.directions.norm);
    for (uint32_t i = 0; i < codec.book.n_secondaries; i++)
        std::copy(std::begin(codec.book.secondaries[i]), std::end(codec.book.secondaries[i]),
                  c.directions.secondaries[i]);
    std::copy(std::begin(codec.wide.values), std::end(codec.wide.values), c.levels);
    return c;
}

static int round_up(int n, int unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Fills args' places; returns the bytes of shared memory. */
static int lay_out(TileArgs &p, const TileKernel &kernel, int row_groups, int stages, int ring, bool looks_up)
{
    choose_table(p.keys, looks_up);
    choose_table(p.values, looks_up);
    if (share_table(p.keys, p.values))
        p.values.table_bytes = 0;
    p.row_groups = row_groups;
    p.by_pages = row_groups < kernel.groups && stages == 2;
    p.stages = stages;
    p.ring = ring;
    p.k_table_at = round_up(kernel.fixed_bytes[row_groups - 1][stages - 1], 16);
    p.v_table_at = p.values.table_bytes ? round_up(p.k_table_at + p.keys.table_bytes, 16) : p.k_table_at;
    p.ring_at = round_up(p.values.table_bytes ? p.v_table_at + p.values.table_bytes
                                              : p.k_table_at + p.keys.table_bytes, 16);
    p.k_page = round_up((int)p.k.bytes, 16);
    p.v_page = round_up((int)p.v.bytes, 16);
    return p.ring_at + ring * (p.k_page + p.v_page);
}

/* What is tried in turn, and whether large tables are there. */
static constexpr struct {
    int stages, ring;
    bool looks_up;
} shapes[] = { { 2, 4, true },  { 2, 3, true },  { 1, 4, true },  { 1, 3, true },
               { 2, 3, false }, { 1, 3, false }, { 2, 0, false }, { 1, 0, false } };

/* Two groups of rows before one, if there are so many rows. Returns the bytes of shared memory, 0 when
 * there is too little. */
static int choose_shape(TileArgs &p, const TileKernel &kernel, int64_t rows, int room)
{
    for (int groups = rows > GROUP_ROWS ? kernel.groups : 1; groups > 0; groups--)
        for (const auto &shape : shapes) {
            const int bytes = lay_out(p, kernel, groups, shape.stages, shape.ring, shape.looks_up);
            if (bytes <= room)
                return bytes;
        }
    return 0;
}

kvant_status launch_tiles(const kvant_cuda_attention_args &args, const AttentionArgs &common, int multiprocessors,
                          int shared_bytes, cudaStream_t stream)
{
    TileArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = tile_codec(*args.k_codec);
    p.values = tile_codec(*args.v_codec);
    const int64_t rows = (int64_t)p.query_tokens * p.heads_a_kv;
    const TileKernel kernel = kernel_of(args.k_codec->params.head_dim);
    const int bytes = kernel.kernel ? choose_shape(p, kernel, rows, shared_bytes) : 0;
    if (bytes == 0)
        return KVANT_ERR_UNSUPPORTED;
    const int tile_rows = p.row_groups * GROUP_ROWS;
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows, items = tiles * p.batch * p.kv_heads;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(std::min<int64_t>(multiprocessors / items, p.max_tokens / (4 * KVANT_PAGE_TOKENS)), 1);
    if (items * p.splits > INT_MAX)
        return KVANT_ERR_UNSUPPORTED;
    cudaError_t error = cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    void *parameters[] = { &p };
    return from_cuda(cudaLaunchKernel(kernel.kernel, dim3((unsigned)(items * p.splits)), kernel.threads, parameters,
                                      (size_t)bytes, stream));
}

} // namespace kvant
