/* host_threads.c - see host_threads.h.
 *
 * A back end cannot find the CPU back end of its context through ggml. But llama.cpp looks up
 * ggml_backend_cpu_set_threadpool by name in the registry entry of the CPU back end. It calls that
 * function before every graph, with the CPU back end and its pool. So this file puts its own
 * look-up function into the entry. For this one name the look-up returns a function that records
 * its arguments and calls ggml's function. It treats ggml_backend_set_n_threads the same way, which
 * llama.cpp calls next: the function that it gets lowers the number. All other names are passed on.
 * When llama.cpp does not ask, nothing is lent.
 *
 * A lender is identified by a number, not by its address. The free function in its table is
 * wrapped, so a CPU back end that any thread freed is not found any more. A new back end at the
 * same address has a new number. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "host_threads.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "attributes.h"
#include "ggml_api.h"
#include "host.h"
#include "openmp.h"

/* How long a thread spins, and how long it then yields its core before it sleeps. Spinning serves
 * loops that follow each other; yielding serves the time in which the node's first thread works
 * alone. A sleeping thread takes about 50 us to wake, so it should not sleep much sooner than that.
 * A thread that spins for longer uses up the time that the system gives it on a busy core, and the
 * system stops it when it then has work. */
#define SPIN_NS 20000
#define YIELD_NS 200000

/* After losing the core for SHARED_NS by yielding, a thread does not yield in its next SHARED_WAITS
 * waits. If another program wants the core, a thread that yields gets it back only after that
 * program's time slice, which is some milliseconds. A thread that sleeps gets the core as soon as
 * it is woken. There are about 100 waits per token, so a thread loses at most one slice per token,
 * and yields again one token after the program has ended. Without such a program a yield takes
 * about 1 us, or about 50 us when a thread of the system runs in between. */
#define SHARED_NS 500000
#define SHARED_WAITS 100

/* Values of kvp_host_threads.loop_phase while one node is computed. The phases of node n begin at n
 * times PHASES, modulo the range of the number. */
#define PHASES (1u << 20)

typedef void set_threadpool_fn(abi_backend *cpu, void *threadpool);
typedef void set_n_threads_fn(abi_backend *cpu, int n);
typedef void free_fn(abi_backend *backend);

/* ggml's CPU back end; constant once ready is set. */
static struct {
    void *(*get_proc_address)(abi_reg *reg, const char *name);
    set_threadpool_fn *set_threadpool;
    set_n_threads_fn *set_n_threads; /* NULL: none found */
    /* its workers belong to OpenMP, whose threads wait for a while even without a pool */
    bool openmp;
    /* Counted with the first back end: later, ggml may have bound this thread to one CPU. */
    uint32_t n_cpus;
    int most_threads;
} host;
static atomic_bool ready;

/* A CPU back end that was given a pool and is not freed. */
struct lender {
    struct lender *next;
    uint64_t number;
    abi_backend *cpu;
    free_fn *free;
    int most; /* the most threads that it may have; 0: as many as llama.cpp sets */
};

static pthread_mutex_t lenders_lock = PTHREAD_MUTEX_INITIALIZER;
static struct lender *lenders;

/* The lender of the current graph, between llama.cpp's two calls before it; 0: none. */
static _Thread_local uint64_t last_lender;
static _Thread_local bool last_waits;

/* Callers hold the lock. */
static struct lender **find_cpu(const abi_backend *cpu)
{
    struct lender **at = &lenders;

    while (*at != NULL && (*at)->cpu != cpu)
        at = &(*at)->next;
    return at;
}

static void free_lender(abi_backend *cpu)
{
    struct lender **at, *lender;

    pthread_mutex_lock(&lenders_lock);
    at = find_cpu(cpu);
    lender = *at;
    if (lender != NULL)
        *at = lender->next;
    pthread_mutex_unlock(&lenders_lock);
    if (lender != NULL) /* a copy of the table in another object is not ours to free */
        lender->free(cpu);
    free(lender);
}

static struct lender *new_lender(abi_backend *cpu)
{
    static uint64_t last_number;
    struct lender *lender = malloc(sizeof(*lender));

    if (lender == NULL)
        return NULL;
    *lender = (struct lender){
        .next = lenders, .number = ++last_number, .cpu = cpu, .free = cpu->iface.free
    };
    cpu->iface.free = free_lender;
    lenders = lender;
    return lender;
}

static uint64_t number_of(abi_backend *cpu)
{
    struct lender *lender;
    uint64_t number;

    pthread_mutex_lock(&lenders_lock);
    lender = *find_cpu(cpu);
    if (lender == NULL)
        lender = new_lender(cpu);
    number = lender != NULL ? lender->number : 0;
    pthread_mutex_unlock(&lenders_lock);
    return number;
}

/* The lender with this number, or NULL when it was freed. Callers hold the lock. */
static struct lender *find_number(uint64_t number)
{
    struct lender *lender = number != 0 ? lenders : NULL;

    while (lender != NULL && lender->number != number)
        lender = lender->next;
    return lender;
}

static abi_backend *living_lender(uint64_t number)
{
    const struct lender *lender;
    abi_backend *cpu;

    pthread_mutex_lock(&lenders_lock);
    lender = find_number(number);
    cpu = lender != NULL ? lender->cpu : NULL;
    pthread_mutex_unlock(&lenders_lock);
    return cpu;
}

static void limit_lender(uint64_t number, int most)
{
    struct lender *lender;

    pthread_mutex_lock(&lenders_lock);
    lender = find_number(number);
    if (lender != NULL)
        lender->most = most;
    pthread_mutex_unlock(&lenders_lock);
}

/* llama.cpp sets the number of threads of all back ends before every graph, the CPU's last. */
static void set_n_threads(abi_backend *cpu, int n)
{
    const struct lender *lender;
    int most;

    pthread_mutex_lock(&lenders_lock);
    lender = *find_cpu(cpu);
    most = lender != NULL ? lender->most : 0;
    pthread_mutex_unlock(&lenders_lock);
    host.set_n_threads(cpu, most > 0 && most < n ? most : n);
}

/* Without a pool and OpenMP ggml starts threads for each graph, so no thread waits between
 * graphs. */
static void set_threadpool(abi_backend *cpu, void *threadpool)
{
    host.set_threadpool(cpu, threadpool);
    last_lender = number_of(cpu);
    last_waits = threadpool != NULL || host.openmp;
}

/* The look-up function in ggml's registry entry. ggml reads the pointer to this function without a
 * barrier. So another thread may run this function before the thread sees variables that were
 * stored earlier. */
static void *get_proc_address(abi_reg *reg, const char *name)
{
    set_threadpool_fn *our_pool = set_threadpool;
    set_n_threads_fn *our_number = set_n_threads;
    void *address;

    while (!atomic_load_explicit(&ready, memory_order_acquire))
        ;
    address = host.get_proc_address(reg, name);
    if (address != NULL && strcmp(name, "ggml_backend_cpu_set_threadpool") == 0)
        memcpy(&address, &our_pool, sizeof(address));
    if (address != NULL && strcmp(name, "ggml_backend_set_n_threads") == 0)
        memcpy(&address, &our_number, sizeof(address));
    return address;
}

static bool has_openmp(abi_reg *reg)
{
    void *symbol = host.get_proc_address(reg, "ggml_backend_get_features");
    const abi_feature *(*get_features)(abi_reg *);

    if (symbol == NULL)
        return false;
    memcpy(&get_features, &symbol, sizeof(get_features));
    for (const abi_feature *feature = get_features(reg); feature->name != NULL; feature++)
        if (strcmp(feature->name, "OPENMP") == 0)
            return true;
    return false;
}

/* The most threads that a lender may have. OpenMP's threads spin at barriers as long as there are
 * no more of them than CPUs. If another process keeps these CPUs busy, a token then takes seconds.
 * If openmp.h cannot help, one thread more than CPUs makes them sleep soon, but divides work
 * unevenly. A single thread never waits at a barrier. */
static int most_threads(void)
{
    const bool spins = host.openmp && host.n_cpus > 1;

    return (int)host.n_cpus + (spins && !kvp_openmp_is_watched());
}

static void watch(void)
{
    abi_device *cpu = kvp_api.dev_by_type != NULL ? kvp_api.dev_by_type(ABI_DEVICE_CPU) : NULL;
    abi_reg *reg =
        cpu != NULL && kvp_api.dev_backend_reg != NULL ? kvp_api.dev_backend_reg(cpu) : NULL;
    void *symbol;

    if (reg == NULL || reg->api_version != kvp_api.api)
        return;
    host.get_proc_address =
        atomic_load_explicit(&reg->iface.get_proc_address, memory_order_acquire);
    symbol = host.get_proc_address != NULL
                 ? host.get_proc_address(reg, "ggml_backend_cpu_set_threadpool")
                 : NULL;
    if (symbol == NULL)
        return;
    memcpy(&host.set_threadpool, &symbol, sizeof(symbol));
    symbol = host.get_proc_address(reg, "ggml_backend_set_n_threads");
    memcpy(&host.set_n_threads, &symbol, sizeof(symbol));
    host.openmp = has_openmp(reg);
    host.n_cpus = kvant_available_cpus();
    host.most_threads = most_threads();
    atomic_store_explicit(&ready, true, memory_order_release);
    atomic_store_explicit(&reg->iface.get_proc_address, get_proc_address, memory_order_release);
}

void kvp_host_threads_use(kvp_host_threads *threads)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch);
    threads->wanted = true;
}

uint32_t kvp_host_threads_update(kvp_host_threads *threads, uint32_t n)
{
    threads->lender = threads->wanted ? last_lender : 0;
    threads->waits = last_waits;
    threads->n = host.n_cpus > 0 && n > host.n_cpus ? host.n_cpus : n;
    limit_lender(threads->lender, host.most_threads);
    if (threads->lender != 0 && threads->n > 1 && host.openmp && host.set_n_threads != NULL)
        kvp_openmp_watch(host.set_n_threads);
    return threads->n;
}

/* Sleeps until the number is no longer `value`. A thread counts itself in before it looks at the
 * number, so the thread that changes the number wakes it. */
static void sleep_while(const atomic_uint *number, unsigned value, kvp_sleepers *sleepers)
{
    pthread_mutex_lock(&sleepers->mutex);
    atomic_fetch_add(&sleepers->n, 1);
    while (atomic_load(number) == value)
        pthread_cond_wait(&sleepers->changed, &sleepers->mutex);
    atomic_fetch_sub(&sleepers->n, 1);
    pthread_mutex_unlock(&sleepers->mutex);
}

static void wake(kvp_sleepers *sleepers)
{
    if (atomic_load(&sleepers->n) == 0)
        return;
    pthread_mutex_lock(&sleepers->mutex);
    pthread_cond_broadcast(&sleepers->changed);
    pthread_mutex_unlock(&sleepers->mutex);
}

/* Yields until the number changes. False when it has not changed and it is time to sleep. */
static bool yield_while(const atomic_uint *number, unsigned value)
{
    static _Thread_local unsigned n_without;
    const int64_t start = kvp_nanoseconds();
    int64_t before = start, now;

    if (n_without > 0) {
        n_without--;
        return false;
    }
    do {
        kvant_os_yield();
        now = kvp_nanoseconds();
        if (now - before > SHARED_NS)
            n_without = SHARED_WAITS;
        if (atomic_load(number) != value)
            return true;
        before = now;
    } while (n_without == 0 && now - start < YIELD_NS);
    return false;
}

static void wait_while(const atomic_uint *number, unsigned value, kvp_sleepers *sleepers)
{
    const int64_t start = kvp_nanoseconds();
    int64_t waited = 0;

    for (unsigned i = 1; waited < SPIN_NS; i++) {
        if (atomic_load(number) != value)
            return;
        KVANT_RELAX();
        if (i % 32 == 0)
            waited = kvp_nanoseconds() - start;
    }
    if (!yield_while(number, value))
        sleep_while(number, value, sleepers);
}

/* Runs a loop of kvant on the lender's threads. An odd phase means that a loop runs. A thread that
 * finds a loop says that it is inside, and then looks again whether the loop still runs. The leader
 * ends the loop first and then looks who is inside. So the leader either waits for the thread, or
 * the thread sees that the loop has ended. A thread that the system does not run makes nobody
 * wait. */
static void run_loop(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    kvp_host_threads *threads = context;

    n_workers = n_workers < KVP_MOST_WORKERS ? n_workers : KVP_MOST_WORKERS;
    atomic_store_explicit(&threads->n_workers, n_workers, memory_order_relaxed);
    threads->work = work;
    threads->loop = loop;
    atomic_fetch_add(&threads->loop_phase, 1);
    wake(&threads->helpers);
    work(loop, 0);
    atomic_fetch_add(&threads->loop_phase, 1);
    for (uint32_t worker = 1; worker < n_workers; worker++)
        if (atomic_load(&threads->workers[worker].inside) != 0)
            wait_while(&threads->workers[worker].inside, 1, &threads->leader);
}

static void join_loop(kvp_host_threads *threads, uint32_t worker, unsigned loop_phase)
{
    if (worker >= atomic_load_explicit(&threads->n_workers, memory_order_relaxed))
        return;
    atomic_store(&threads->workers[worker].inside, 1);
    if (atomic_load(&threads->loop_phase) == loop_phase)
        threads->work(threads->loop, worker);
    atomic_store(&threads->workers[worker].inside, 0);
    wake(&threads->leader);
}

/* Helps until the node ends. A graph has several nodes, and llama.cpp's threads meet after each of
 * them, so the phase is one of this node's or the next node's first one. */
static void help(kvp_host_threads *threads, unsigned node, uint32_t worker)
{
    unsigned loop_phase;

    while ((loop_phase = atomic_load(&threads->loop_phase)) / PHASES == node) {
        if (loop_phase % 2 == 1)
            join_loop(threads, worker, loop_phase);
        wait_while(&threads->loop_phase, loop_phase, &threads->helpers);
    }
}

static void lead(kvp_host_threads *threads, unsigned node, void (*compute)(void *user), void *user)
{
    const kvant_executor *former = kvant_use_executor(&threads->executor);

    compute(user);
    kvant_use_executor(former);
    atomic_store(&threads->loop_phase, (node + 1) * PHASES);
    wake(&threads->helpers);
}

/* The node's function, which each of the lender's threads calls. */
static void run_node(abi_tensor *node, int thread, int n_threads, void *user)
{
    kvp_host_threads *threads = user;

    (void)node;
    (void)n_threads;
    if (thread == 0) {
        threads->computed = true;
        lead(threads, 0, threads->compute, threads->user);
    } else {
        help(threads, 0, (uint32_t)thread);
    }
}

static void init_sleepers(kvp_sleepers *sleepers)
{
    pthread_mutex_init(&sleepers->mutex, NULL);
    pthread_cond_init(&sleepers->changed, NULL);
}

static void destroy_sleepers(kvp_sleepers *sleepers)
{
    pthread_mutex_destroy(&sleepers->mutex);
    pthread_cond_destroy(&sleepers->changed);
}

static void init_loops(kvp_host_threads *threads)
{
    if (threads->executor.run == NULL) {
        init_sleepers(&threads->helpers);
        init_sleepers(&threads->leader);
        threads->executor = (kvant_executor){ .run = run_loop, .context = threads };
    }
    atomic_store(&threads->loop_phase, 0);
}

static bool build_graph(kvp_host_threads *threads)
{
    abi_init_params params = { .mem_size = 2 * kvp_api.tensor_overhead() + kvp_api.graph_overhead(),
                               .no_alloc = true };
    abi_tensor *node;

    if (threads->graph != NULL)
        return true;
    threads->context = kvp_api.init(params);
    if (threads->context == NULL)
        return false;
    node = kvp_api.custom_4d(threads->context, ABI_TYPE_F32, 1, 1, 1, 1, NULL, 0, run_node,
                             ABI_N_TASKS_MAX, threads);
    threads->graph = kvp_api.new_graph(threads->context);
    kvp_api.build_forward_expand(threads->graph, node);
    return true;
}

/* Computes the node. An abort callback may set a status that stops llama.cpp; llama.cpp's next
 * graph asks the callback again. */
void kvp_host_threads_compute(kvp_host_threads *threads, void (*compute)(void *user), void *user)
{
    last_lender = 0;
    threads->cpu = living_lender(threads->lender);
    threads->compute = compute;
    threads->user = user;
    threads->computed = false;
    init_loops(threads);
    if (threads->cpu != NULL && threads->waits && threads->n > 1 && build_graph(threads))
        (void)kvp_api.graph_compute(threads->cpu, threads->graph);
    if (!threads->computed)
        compute(user);
}

void kvp_host_threads_begin(kvp_host_threads *threads)
{
    last_lender = 0;
    init_loops(threads);
}

void kvp_host_threads_share(kvp_host_threads *threads, unsigned node, uint32_t thread,
                            uint32_t n_threads, void (*compute)(void *user), void *user)
{
    node %= UINT_MAX / PHASES + 1;
    if (n_threads == 1)
        compute(user);
    else if (thread == 0)
        lead(threads, node, compute, user);
    else
        help(threads, node, thread);
}

void kvp_host_threads_release(kvp_host_threads *threads)
{
    if (threads->executor.run != NULL) {
        destroy_sleepers(&threads->helpers);
        destroy_sleepers(&threads->leader);
    }
    if (threads->context != NULL)
        kvp_api.free(threads->context);
    threads->context = NULL;
    threads->graph = NULL;
}
