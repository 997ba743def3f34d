/* openmp.c - see openmp.h.
 *
 * The plug-in is not linked with OpenMP, and a process may hold several OpenMP libraries. So ggml
 * makes the team that does nothing: it computes a graph with two threads on a thread of kvant. From
 * then on libgomp counts one thread more, until kvant's thread ends. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "openmp.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ggml_api.h"
#include "host.h"

/* The time in which the thread ran or waited for a core, after which a decision is due. A shorter
 * time makes the share below uncertain. */
#define PERIOD_NS 50000000

/* The part of this time that the thread waited for a core. With a busy program on its core, a
 * thread that spins waits for half of the time; on an idle machine, for less than a hundredth. */
#define SHARED_PART .25
#define IDLE_PART .05

/* How long the team exists the first time. Threads that sleep often wait for a core often, even
 * when other programs need little of it. So the team is removed after some time, to see how long
 * spinning threads wait. Each time that this shows a shared core, the next time is twice as long,
 * because tokens may take seconds meanwhile. */
#define FIRST_HOLD_NS 4000000000
#define LONGEST_HOLD_NS 64000000000

static struct {
    pthread_mutex_t lock, computing;
    pthread_cond_t changed;
    abi_backend *cpu; /* these two are never freed */
    abi_graph *graph;
    uintptr_t number; /* the number of the team; 0: there is none */
    int64_t until, hold;
} team = { .lock = PTHREAD_MUTEX_INITIALIZER,
           .computing = PTHREAD_MUTEX_INITIALIZER,
           .changed = PTHREAD_COND_INITIALIZER,
           .hold = FIRST_HOLD_NS };

/* The time of a thread since it began, in nanoseconds: on a core, and waiting for a core. */
struct spent {
    int64_t running, waiting;
};

static bool read_spent(struct spent *spent)
{
    FILE *file = kvp_host_open("/proc/thread-self/schedstat", false);
    long long running, waiting;
    bool complete;

    if (file == NULL)
        return false;
    complete = fscanf(file, "%lld %lld", &running, &waiting) == 2;
    fclose(file);
    if (complete)
        *spent = (struct spent){ running, waiting };
    return complete;
}

static bool environment_decides(void)
{
    return kvant_os_variable("GOMP_SPINCOUNT") != NULL ||
           kvant_os_variable("OMP_WAIT_POLICY") != NULL;
}

bool kvp_openmp_is_watched(void)
{
    struct spent spent;

    return environment_decides() || (read_spent(&spent) && kvp_api.dev_init != NULL);
}

static void no_work(abi_tensor *node, int thread, int n_threads, void *user)
{
    (void)node;
    (void)thread;
    (void)n_threads;
    (void)user;
}

/* Creates the graph; true when it exists. Callers hold the lock. After a failure the next call
 * tries again with the objects that exist. */
static bool have_graph(void (*set_n_threads)(abi_backend *cpu, int n))
{
    abi_init_params params = { .mem_size = 2 * kvp_api.tensor_overhead() + kvp_api.graph_overhead(),
                               .no_alloc = true };
    abi_context *context;
    abi_graph *graph;

    if (team.cpu == NULL)
        team.cpu = kvp_api.dev_init(kvp_api.dev_by_type(ABI_DEVICE_CPU), NULL);
    if (team.cpu == NULL || team.graph != NULL)
        return team.cpu != NULL;
    context = kvp_api.init(params);
    if (context == NULL)
        return false;
    graph = kvp_api.new_graph(context);
    kvp_api.build_forward_expand(graph, kvp_api.custom_4d(context, ABI_TYPE_F32, 1, 1, 1, 1, NULL,
                                                          0, no_work, ABI_N_TASKS_MAX, NULL));
    set_n_threads(team.cpu, 2);
    team.graph = graph;
    return true;
}

static void *hold_team(void *number)
{
    pthread_mutex_lock(&team.computing);
    (void)kvp_api.graph_compute(team.cpu, team.graph);
    pthread_mutex_unlock(&team.computing);
    pthread_mutex_lock(&team.lock);
    while (team.number == (uintptr_t)number)
        pthread_cond_wait(&team.changed, &team.lock);
    pthread_mutex_unlock(&team.lock);
    return NULL;
}

static bool start_thread(uintptr_t number)
{
    pthread_t thread;
    const bool started = kvant_os_start_thread(&thread, hold_team, (void *)number, 0);

    if (started)
        pthread_detach(thread);
    return started;
}

/* Callers hold the lock. */
static void add_team(int64_t now, void (*set_n_threads)(abi_backend *cpu, int n))
{
    static uintptr_t last_number;

    if (!have_graph(set_n_threads) || !start_thread(last_number + 1))
        return;
    team.number = ++last_number;
    team.until = now + team.hold;
    team.hold = 2 * team.hold < LONGEST_HOLD_NS ? 2 * team.hold : LONGEST_HOLD_NS;
}

static void decide(double waited, int64_t now, void (*set_n_threads)(abi_backend *cpu, int n))
{
    pthread_mutex_lock(&team.lock);
    if (team.number == 0 && waited > SHARED_PART) {
        add_team(now, set_n_threads);
    } else if (team.number == 0) {
        team.hold = FIRST_HOLD_NS;
    } else if (waited < IDLE_PART || now > team.until) {
        team.number = 0;
        pthread_cond_broadcast(&team.changed);
    }
    pthread_mutex_unlock(&team.lock);
}

void kvp_openmp_watch(void (*set_n_threads)(abi_backend *cpu, int n))
{
    static _Thread_local struct spent before;
    static _Thread_local int64_t looked;
    const int64_t now = kvp_nanoseconds();
    struct spent spent;
    int64_t running, waiting;

    if (now - looked < PERIOD_NS || environment_decides() || !read_spent(&spent))
        return;
    running = spent.running - before.running;
    waiting = spent.waiting - before.waiting;
    const bool first = looked == 0; /* what the thread did before its first graph does not count */
    looked = now;
    if (!first && running + waiting < PERIOD_NS)
        return;
    before = spent;
    if (first)
        return;
    decide((double)waiting / (double)(running + waiting), now, set_n_threads);
}
