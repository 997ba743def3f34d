/* index.cu - codes of an index in device memory, and searches of them: the functions of device/index.h.
 *
 * A search is a few rounds (ScanArgs). The first takes as many vectors as a list has places for,
 * spread over the index. Thresholds from them let few of the next, much larger part pass, and so on:
 * three rounds for a million vectors. A list that is too short all the same, as may happen with
 * thousands of equal vectors, makes the search begin again with rounds that no list can be too short for. */
#include "index.h"

#include "../checks.h"
#include "../table.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>

using namespace kvant;

namespace
{

constexpr uint32_t MOST_QUERIES = 1024; /* at once: lists are 32 MB; a multiple of 32 */
constexpr uint32_t LIST_PLACES = 4096, LONG_LIST_PLACES = 16384, MOST_LONG_LISTS = 64;
constexpr uint32_t MOST_GROWTH = 64;

/* Device memory that only grows. */
struct Room {
    void *at = nullptr;
    size_t bytes = 0;

    Room() = default;
    Room(const Room &) = delete;
    ~Room()
    {
        cudaFree(at);
    }
    cudaError_t reserve(size_t wanted)
    {
        if (wanted <= bytes)
            return cudaSuccess;
        cudaFree(at);
        at = nullptr;
        bytes = 0;
        const cudaError_t error = cudaMalloc(&at, wanted);
        if (error == cudaSuccess)
            bytes = wanted;
        return error;
    }
    template <class T> T *as() const
    {
        return static_cast<T *>(at);
    }
};

/* The calling thread's GPU is another one for a while. */
class OnDevice
{
  public:
    explicit OnDevice(int device)
    {
        cudaGetDevice(&before);
        if (before != device)
            cudaSetDevice(device);
    }
    ~OnDevice()
    {
        cudaSetDevice(before);
    }

  private:
    int before = 0;
};

/* The first error of a row of calls. */
class Calls
{
  public:
    cudaError_t error = cudaSuccess;
    bool ok() const
    {
        return error == cudaSuccess;
    }
    template <class F> Calls &then(F &&call)
    {
        if (ok())
            error = call();
        return *this;
    }
    kvant_status status() const
    {
        if (error == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            return KVANT_ERR_MEMORY;
        }
        return from_cuda(error);
    }
};

} // namespace

struct kvant_cuda_index {
    int device = 0;
    uint32_t bits = 0;
    ScanArgs args{};
    Room codes, factors, offsets, ids;
    Room x, sums, scales, weights, passes, lists, counts, thresholds, limits, overflowed;
    cudaStream_t stream = nullptr;
    std::mutex mutex;
};

namespace
{

uint32_t ceil_div(size_t a, size_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* Copies n bytes to a room of `bytes` and more bytes, zeros behind them. */
cudaError_t fill(Room &room, const void *from, size_t n, size_t bytes)
{
    Calls calls;
    calls.then([&] { return room.reserve(bytes); });
    calls.then([&] { return cudaMemset(room.at, 0, bytes); });
    if (n > 0)
        calls.then([&] { return cudaMemcpy(room.at, from, n, cudaMemcpyHostToDevice); });
    return calls.error;
}

void set_levels(ScanArgs &args, const kvant_cuda_index_args &from)
{
    uint8_t bytes[16] = { 0 };
    args.bias = from.bits == 1 ? 1 : from.bits == 4 ? from.levels[15] : 0;
    for (uint32_t i = 0; from.bits < 8 && i < 1u << from.bits; i++)
        bytes[i] = (uint8_t)(from.levels[i] + (from.bits == 4 ? args.bias : 0));
    memcpy(args.levels, bytes, sizeof bytes);
}

/* A number near the golden section of n that has no divisor in common with it. */
uint32_t multiplier_for(uint32_t n)
{
    uint32_t multiplier = (uint32_t)(0.6180339887 * n) + 1;
    while (std::gcd(multiplier, n) != 1)
        multiplier++;
    return multiplier;
}

kvant_status upload(kvant_cuda_index &index, const kvant_cuda_index_args &from)
{
    ScanArgs &args = index.args;
    const size_t n_packs = ceil_div(from.n, 32), pack_bytes = (size_t)from.n_quads * 16 * from.bits;
    args.pack_bytes = pack_bytes;
    args.n_slots = (uint32_t)from.n;
    args.n_quads = from.n_quads;
    args.n_pieces = ceil_div(from.n_quads, 16);
    args.n_groups = ceil_div(n_packs, GROUP_PACKS);
    args.multiplier = args.n_groups > 0 ? multiplier_for(args.n_groups) : 1;
    set_levels(args, from);
    const size_t numbers = n_packs * 32 * sizeof(float), room = (size_t)args.n_groups * GROUP_VECTORS * sizeof(float);
    Calls calls;
    calls.then([&] { return cudaGetDevice(&index.device); });
    calls.then([&] {
        return fill(index.codes, from.codes, n_packs * pack_bytes, args.n_groups * GROUP_PACKS * pack_bytes + READ_BEYOND);
    });
    calls.then([&] { return fill(index.factors, from.factors, numbers, room + 16); });
    if (from.offsets)
        calls.then([&] { return fill(index.offsets, from.offsets, numbers, room + 16); });
    if (from.ids)
        calls.then([&] { return fill(index.ids, from.ids, from.n * sizeof(uint64_t), (from.n + 1) * sizeof(uint64_t)); });
    calls.then([&] { return cudaStreamCreateWithFlags(&index.stream, cudaStreamNonBlocking); });
    calls.then([&] { return cudaStreamSynchronize(cudaStreamLegacy); });
    args.codes = index.codes.as<uint8_t>();
    args.factors = index.factors.as<float>();
    args.offsets = index.offsets.as<float>();
    args.ids = index.ids.as<uint64_t>();
    return calls.status();
}

/* ---- A search ---- */

cudaError_t send(kvant_cuda_index &index, Room &room, const void *from, size_t bytes)
{
    Calls calls;
    calls.then([&] { return room.reserve(bytes); });
    calls.then([&] { return cudaMemcpyAsync(room.at, from, bytes, cudaMemcpyHostToDevice, index.stream); });
    return calls.error;
}

/* Queries first to first + n; what rounds change is set by begin. */
cudaError_t prepare(kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first, uint32_t n, ScanArgs &args)
{
    args = index.args;
    args.n_queries = n;
    args.k = find.k;
    args.room = n <= MOST_LONG_LISTS || find.k > LIST_PLACES / 4 ? LONG_LIST_PLACES : LIST_PLACES;
    const size_t words = (size_t)args.n_quads * n;
    Calls calls;
    calls.then([&] { return send(index, index.x, find.x + first * 4 * args.n_quads, words * 4); });
    calls.then([&] { return send(index, index.sums, find.sums + first, n * sizeof(int32_t)); });
    calls.then([&] { return send(index, index.scales, find.scales + first, n * sizeof(float)); });
    calls.then([&] { return send(index, index.weights, find.weights + first, n * sizeof(float)); });
    calls.then([&] { return index.lists.reserve((size_t)n * args.room * sizeof(Found)); });
    calls.then([&] { return index.counts.reserve(n * sizeof(uint32_t)); });
    calls.then([&] { return index.thresholds.reserve(n * sizeof(float)); });
    calls.then([&] { return index.limits.reserve(n * sizeof(uint64_t)); });
    calls.then([&] { return index.overflowed.reserve(sizeof(uint32_t)); });
    args.x = index.x.as<uint32_t>();
    args.sums = index.sums.as<int32_t>();
    args.scales = index.scales.as<float>();
    args.weights = index.weights.as<float>();
    args.passes = find.passes ? index.passes.as<uint32_t>() : nullptr;
    args.lists = index.lists.as<Found>();
    args.counts = index.counts.as<uint32_t>();
    args.thresholds = index.thresholds.as<float>();
    args.limits = index.limits.as<uint64_t>();
    args.overflowed = index.overflowed.as<uint32_t>();
    return calls.error;
}

/* Thresholds of -infinity: bytes of 0xff would be NaNs. */
__global__ void begin_kernel(const __grid_constant__ ScanArgs args)
{
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.n_queries)
        args.thresholds[i] = -INFINITY;
    if (i == 0)
        *args.overflowed = 0;
}

/* safely: no round has more vectors than lists have places for. */
cudaError_t run_rounds(const kvant_cuda_index &index, ScanArgs args, bool safely)
{
    const uint32_t places = args.room / GROUP_VECTORS, left = (args.room - args.k) / GROUP_VECTORS,
                   growth = std::min(MOST_GROWTH, std::max(1u, (args.room - args.k) / (3 * args.k)));
    Calls calls;
    begin_kernel<<<ceil_div(args.n_queries, 256), 256, 0, index.stream>>>(args);
    calls.error = cudaGetLastError();
    calls.then([&] {
        return cudaMemsetAsync(args.lists, 0xff, (size_t)args.n_queries * args.room * sizeof(Found), index.stream);
    });
    for (args.end = 0; calls.ok() && args.end < args.n_groups;) {
        const uint64_t most = args.end == 0 ? places : safely ? left : (uint64_t)args.end * growth;
        args.keep_all = args.end == 0;
        args.first = args.end;
        args.end = (uint32_t)std::min<uint64_t>(args.n_groups, args.first + most);
        calls.then([&] { return launch_scan(args, index.bits, index.stream); });
        calls.then([&] { return launch_select(args, index.stream); });
    }
    return calls.error;
}

cudaError_t receive(const kvant_cuda_index &index, const ScanArgs &args, const kvant_cuda_find_args &find, size_t first,
                    uint32_t &overflowed)
{
    const size_t row = args.k * sizeof(Found);
    Calls calls;
    calls.then([&] {
        return cudaMemcpy2DAsync(find.found + first * args.k, row, args.lists, args.room * sizeof(Found), row, args.n_queries,
                                 cudaMemcpyDeviceToHost, index.stream);
    });
    calls.then([&] {
        return cudaMemcpyAsync(find.n_found + first, args.counts, args.n_queries * sizeof(uint32_t),
                               cudaMemcpyDeviceToHost, index.stream);
    });
    calls.then([&] {
        return cudaMemcpyAsync(&overflowed, args.overflowed, sizeof overflowed, cudaMemcpyDeviceToHost, index.stream);
    });
    calls.then([&] { return cudaStreamSynchronize(index.stream); });
    return calls.error;
}

kvant_status find_some(kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first, uint32_t n)
{
    ScanArgs args;
    uint32_t overflowed = 0;
    Calls calls;
    calls.then([&] { return prepare(index, find, first, n, args); });
    for (int safely = 0; calls.ok() && (safely == 0 || overflowed); safely++) {
        calls.then([&] { return run_rounds(index, args, safely != 0); });
        calls.then([&] { return receive(index, args, find, first, overflowed); });
    }
    return calls.status();
}

} // namespace

kvant_status kvant_cuda_table_index_create(const kvant_cuda_index_args *args, kvant_cuda_index **index)
{
    *index = nullptr;
    const bool known = args->bits == 8 || (args->bits >= 1 && args->bits <= 4);
    if (!known)
        return KVANT_ERR_UNSUPPORTED;
    kvant_cuda_index *made = new (std::nothrow) kvant_cuda_index;
    if (!made)
        return KVANT_ERR_MEMORY;
    made->bits = args->bits;
    const kvant_status status = upload(*made, *args);
    if (status == KVANT_OK)
        *index = made;
    else
        kvant_cuda_table_index_free(&made);
    return status;
}

void kvant_cuda_table_index_free(kvant_cuda_index **index)
{
    if (!*index)
        return;
    const OnDevice on((*index)->device);
    if ((*index)->stream)
        cudaStreamDestroy((*index)->stream);
    delete *index;
    *index = nullptr;
}

kvant_status kvant_cuda_table_index_find(kvant_cuda_index *index, const kvant_cuda_find_args *args)
{
    if (args->k < 1 || args->k > KVANT_CUDA_INDEX_MOST_K)
        return KVANT_ERR_ARGUMENT;
    const std::lock_guard<std::mutex> lock(index->mutex);
    const OnDevice on(index->device);
    Calls calls;
    if (args->passes)
        calls.then([&] { return send(*index, index->passes, args->passes, ceil_div(index->args.n_slots, 32) * sizeof(uint32_t)); });
    kvant_status status = calls.status();
    for (size_t first = 0; status == KVANT_OK && first < args->n; first += MOST_QUERIES)
        status = find_some(*index, *args, first, (uint32_t)std::min<size_t>(args->n - first, MOST_QUERIES));
    return status;
}
