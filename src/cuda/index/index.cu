/* index.cu - the codes of a vector index in device memory, and searches in them: the functions of
 * device/index.h.
 *
 * A search has a few rounds (ScanArgs). The first round takes as many vectors as a list has places,
 * spread over the index. The thresholds from them let only a few vectors of the next, much larger
 * part pass, and so on; a million vectors take three rounds. A list may still be too short, for
 * example with thousands of equal vectors. Then the search begins again with rounds for which no
 * list can be too short. */
#include "index.h"

#include "../checks.h"
#include "../table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>

using namespace kvant;

namespace
{

/* Queries at once; their lists take 32 MB. A multiple of 32. */
constexpr uint32_t MOST_QUERIES = 1024;
constexpr uint32_t MOST_LONG_LISTS = 64;
constexpr uint32_t MOST_GROWTH = 64, PACK_SLOTS = 32;

/* Memory that only grows, in the device or pinned in the host. */
template <bool HOST> struct Memory {
    void *at = nullptr;
    size_t bytes = 0;

    Memory() = default;
    Memory(const Memory &) = delete;
    ~Memory()
    {
        release();
    }
    void release()
    {
        HOST ? cudaFreeHost(at) : cudaFree(at);
        at = nullptr;
        bytes = 0;
    }
    cudaError_t reserve(size_t wanted)
    {
        if (wanted <= bytes)
            return cudaSuccess;
        release();
        const cudaError_t error = HOST ? cudaMallocHost(&at, wanted) : cudaMalloc(&at, wanted);
        if (error == cudaSuccess)
            bytes = wanted;
        return error;
    }
    template <class T> T *as() const
    {
        return static_cast<T *>(at);
    }
};

using Room = Memory<false>;
using HostRoom = Memory<true>;

/* Makes another GPU the calling thread's GPU until the end of its scope. */
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

/* Keeps the first error of several calls. */
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
    Room queries, results, passes, lists, thresholds, limits; /* memory of a search */
    HostRoom staging;
    cudaStream_t stream = nullptr;
    std::mutex mutex;
};

namespace
{

uint32_t ceil_div(size_t a, size_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* Copies n bytes to a room of at least `bytes` bytes, and fills the rest with zeros. */
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
    args.bias = from.bits == 1 || from.bits == 4 ? from.bias : 0;
    for (uint32_t i = 0; from.bits < 8 && i < 1u << from.bits; i++)
        bytes[i] = (uint8_t)(from.levels[i] + (from.bits == 4 ? args.bias : 0));
    memcpy(args.levels, bytes, sizeof bytes);
}

/* A number near the golden section of n that has no divisor in common with n. */
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
    const size_t n_packs = ceil_div(from.n, PACK_SLOTS),
                 pack_bytes = (size_t)from.n_quads * 16 * from.bits;
    args.pack_bytes = pack_bytes;
    args.n_slots = (uint32_t)from.n;
    args.n_quads = from.n_quads;
    args.n_pieces = 2 * ceil_div(from.n_quads, 32);
    args.n_groups = ceil_div(n_packs, GROUP_PACKS);
    args.multiplier = args.n_groups > 0 ? multiplier_for(args.n_groups) : 1;
    set_levels(args, from);
    const size_t numbers = n_packs * PACK_SLOTS * sizeof(float),
                 room = (size_t)args.n_groups * GROUP_VECTORS * sizeof(float);
    Calls calls;
    calls.then([&] { return cudaGetDevice(&index.device); });
    calls.then([&] {
        return fill(index.codes, nullptr, 0,
                    args.n_groups * GROUP_PACKS * pack_bytes + READ_BEYOND);
    });
    calls.then([&] { return fill(index.factors, from.factors, numbers, room + 16); });
    if (from.offsets)
        calls.then([&] { return fill(index.offsets, from.offsets, numbers, room + 16); });
    if (from.ids)
        calls.then([&] {
            return fill(index.ids, from.ids, from.n * sizeof(uint64_t),
                        (from.n + 1) * sizeof(uint64_t));
        });
    calls.then([&] { return cudaStreamCreateWithFlags(&index.stream, cudaStreamNonBlocking); });
    calls.then([&] { return cudaStreamSynchronize(cudaStreamLegacy); });
    args.codes = index.codes.as<uint8_t>();
    args.factors = index.factors.as<float>();
    args.offsets = index.offsets.as<float>();
    args.ids = index.ids.as<uint64_t>();
    return calls.status();
}

/* ---- A search ---- */

/* The offsets in bytes of arrays that are copied in one piece. */
struct Queries {
    size_t sums, scales, weights, end; /* x is the first array */
    Queries(size_t n_quads, size_t n)
        : sums((4 * n_quads * n + 15) / 16 * 16), scales(sums + 4 * n), weights(scales + 4 * n),
          end(weights + 4 * n)
    {
    }
};

struct Results {
    size_t counts, overflowed, end; /* the best are the first array */
    Results(size_t n, size_t k)
        : counts(n * k * sizeof(Found)), overflowed(counts + 4 * n), end(overflowed + 4)
    {
    }
};

template <class T> T *part(const Room &room, size_t at)
{
    return reinterpret_cast<T *>(room.as<uint8_t>() + at);
}

cudaError_t send_queries(kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first,
                         uint32_t n)
{
    const size_t n_quads = index.args.n_quads;
    const Queries at(n_quads, n);
    uint8_t *to = index.staging.as<uint8_t>();
    memcpy(to, find.x + first * 4 * n_quads, 4 * n_quads * n);
    memcpy(to + at.sums, find.sums + first, 4 * n);
    memcpy(to + at.scales, find.scales + first, 4 * n);
    memcpy(to + at.weights, find.weights + first, 4 * n);
    return cudaMemcpyAsync(index.queries.at, to, at.end, cudaMemcpyHostToDevice, index.stream);
}

/* Prepares queries first to first + n. */
cudaError_t prepare(kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first,
                    uint32_t n, ScanArgs &args)
{
    args = index.args;
    args.n_queries = n;
    args.k = find.k;
    args.room = n <= MOST_LONG_LISTS || find.k > SHORT_LIST / 4 ? longest_list() : SHORT_LIST;
    const Queries from(args.n_quads, n);
    const Results to(n, find.k);
    Calls calls;
    calls.then([&] { return index.staging.reserve(std::max(from.end, to.end)); });
    calls.then([&] { return index.queries.reserve(from.end); });
    calls.then([&] { return index.results.reserve(to.end); });
    calls.then([&] { return index.lists.reserve((size_t)n * args.room * sizeof(Found)); });
    calls.then([&] { return index.thresholds.reserve(n * sizeof(float)); });
    calls.then([&] { return index.limits.reserve(n * sizeof(uint64_t)); });
    calls.then([&] { return send_queries(index, find, first, n); });
    args.x = part<uint32_t>(index.queries, 0);
    args.sums = part<int32_t>(index.queries, from.sums);
    args.scales = part<float>(index.queries, from.scales);
    args.weights = part<float>(index.queries, from.weights);
    args.passes = find.passes ? index.passes.as<uint32_t>() : nullptr;
    args.lists = index.lists.as<Found>();
    args.best = part<Found>(index.results, 0);
    args.counts = part<uint32_t>(index.results, to.counts);
    args.overflowed = part<uint32_t>(index.results, to.overflowed);
    args.thresholds = index.thresholds.as<float>();
    args.limits = index.limits.as<uint64_t>();
    return calls.error;
}

/* The factor by which the number of vectors grows from round to round: as evenly as lists allow. */
uint32_t growth_of(const ScanArgs &args, uint32_t places)
{
    const double most =
                     std::min(MOST_GROWTH, std::max(2u, (args.room - args.k) / (3 * args.k) + 1)),
                 ratio = std::max(2.0, (double)args.n_groups / places),
                 rounds = std::ceil(std::log(ratio) / std::log(most));
    return (uint32_t)std::ceil(std::pow(ratio, 1 / rounds));
}

/* safely: no round has more vectors than lists have places. */
cudaError_t run_rounds(const kvant_cuda_index &index, ScanArgs args, bool safely)
{
    const uint32_t places = args.room / GROUP_VECTORS, left = (args.room - args.k) / GROUP_VECTORS,
                   growth = growth_of(args, places);
    Calls calls;
    for (args.end = 0; calls.ok() && args.end < args.n_groups;) {
        const uint64_t most = args.end == 0 ? places
                              : safely      ? left
                                            : (uint64_t)args.end * (growth - 1);
        args.keep_all = args.end == 0;
        args.first = args.end;
        args.end = (uint32_t)std::min<uint64_t>(args.n_groups, args.first + most);
        calls.then([&] { return launch_scan(args, index.bits, index.stream); });
        calls.then([&] { return launch_select(args, index.stream); });
    }
    return calls.error;
}

cudaError_t receive(const kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first,
                    uint32_t n, uint32_t &overflowed)
{
    const Results at(n, find.k);
    const uint8_t *from = index.staging.as<uint8_t>();
    Calls calls;
    calls.then([&] {
        return cudaMemcpyAsync(index.staging.at, index.results.at, at.end, cudaMemcpyDeviceToHost,
                               index.stream);
    });
    calls.then([&] { return cudaStreamSynchronize(index.stream); });
    if (calls.ok()) {
        memcpy(find.found + first * find.k, from, at.counts);
        memcpy(find.n_found + first, from + at.counts, 4 * n);
        memcpy(&overflowed, from + at.overflowed, 4);
    }
    return calls.error;
}

kvant_status find_some(kvant_cuda_index &index, const kvant_cuda_find_args &find, size_t first,
                       uint32_t n)
{
    ScanArgs args;
    uint32_t overflowed = 0;
    Calls calls;
    calls.then([&] { return prepare(index, find, first, n, args); });
    for (int safely = 0; calls.ok() && (safely == 0 || overflowed); safely++) {
        calls.then([&] { return run_rounds(index, args, safely != 0); });
        calls.then([&] { return receive(index, find, first, n, overflowed); });
    }
    return calls.status();
}

} // namespace

kvant_status kvant_cuda_table_index_create(const kvant_cuda_index_args *args,
                                           kvant_cuda_index **index)
{
    *index = nullptr;
    const bool known = args->bits == 8 || (args->bits >= 2 && args->bits <= 4) ||
                       (args->bits == 1 && args->levels[0] == -1 && args->levels[1] == 1);
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

kvant_status kvant_cuda_table_index_put(kvant_cuda_index *index, size_t first, size_t n,
                                        const uint8_t *codes)
{
    const OnDevice on(index->device);
    const size_t bytes = index->args.pack_bytes;
    Calls calls;
    calls.then([&] {
        return cudaMemcpy(index->codes.as<uint8_t>() + first * bytes, codes, n * bytes,
                          cudaMemcpyHostToDevice);
    });
    /* A copy of at most 64 KB may return before the device has it, and the index's stream does not
     * wait for the default stream. */
    calls.then([&] { return cudaStreamSynchronize(cudaStreamLegacy); });
    return calls.status();
}

kvant_status kvant_cuda_table_index_find(kvant_cuda_index *index, const kvant_cuda_find_args *args)
{
    if (args->k < 1 || args->k > KVANT_CUDA_INDEX_MOST_K)
        return KVANT_ERR_ARGUMENT;
    const std::lock_guard<std::mutex> lock(index->mutex);
    const OnDevice on(index->device);
    const size_t pass_bytes = ceil_div(index->args.n_slots, PACK_SLOTS) * sizeof(uint32_t);
    Calls calls;
    if (index->args.n_slots == 0) {
        std::fill_n(args->n_found, args->n, 0u);
        return KVANT_OK;
    }
    if (args->passes) {
        calls.then([&] { return index->passes.reserve(pass_bytes); });
        calls.then([&] {
            return cudaMemcpyAsync(index->passes.at, args->passes, pass_bytes,
                                   cudaMemcpyHostToDevice, index->stream);
        });
    }
    kvant_status status = calls.status();
    for (size_t first = 0; status == KVANT_OK && first < args->n; first += MOST_QUERIES)
        status = find_some(*index, *args, first,
                           (uint32_t)std::min<size_t>(args->n - first, MOST_QUERIES));
    return status;
}
