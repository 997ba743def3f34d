/* test_available.c - kvant_available_cpus: the affinity, the CPU time that control groups allow
 * (read from made-up files of both versions of control groups), and loops of the pool on one
 * CPU. */
#define _GNU_SOURCE
#include "testing.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>

#include "../../src/base/available.h"
#include "../../src/base/parallel.h"

static char root[64];

/* Writes a file of the made-up system and the folders that contain it. */
static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    char *slash = full + strlen(root);
    while ((slash = strchr(slash + 1, '/')) != NULL) {
        *slash = 0;
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int new_root(void **state)
{
    snprintf(root, sizeof root, "/tmp/kvant_available_XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

CASE_BETWEEN(version_2_of_control_groups, new_root, remove_root)
{
    assert_true(kvant_quota_cpus(root) == UINT32_MAX); /* no such system */
    put("/proc/self/cgroup", "0::/pod/container\n");
    assert_true(kvant_quota_cpus(root) == UINT32_MAX);
    put("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
    assert_true(kvant_quota_cpus(root) == UINT32_MAX);
    put("/sys/fs/cgroup/pod/container/cpu.max", "250000 100000\n");
    assert_int_equal(kvant_quota_cpus(root), 3); /* rounded up */
    put("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n");
    assert_int_equal(kvant_quota_cpus(root), 2); /* the parent group allows less */
    put("/sys/fs/cgroup/pod/container/cpu.max", "1000 100000\n");
    assert_int_equal(kvant_quota_cpus(root), 1);
}

/* A container often has its own group at the mount point, under the name that the host gave it. */
CASE_BETWEEN(a_container_sees_the_hosts_path, new_root, remove_root)
{
    put("/proc/self/cgroup", "0::/system.slice/docker-0123.scope\n");
    put("/sys/fs/cgroup/cpu.max", "150000 50000\n");
    assert_int_equal(kvant_quota_cpus(root), 3);
}

CASE_BETWEEN(version_1_of_control_groups, new_root, remove_root)
{
    put("/proc/self/cgroup", "12:cpuset:/a\n4:cpu,cpuacct:/a/b\n1:name=systemd:/\n0::/\n");
    put("/sys/fs/cgroup/cpuset/a/cpu.cfs_quota_us", "1"); /* a file of another controller */
    put("/sys/fs/cgroup/cpuset/a/cpu.cfs_period_us", "1");
    put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
    assert_true(kvant_quota_cpus(root) == UINT32_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
    assert_int_equal(kvant_quota_cpus(root), 4);
}

CASE_BETWEEN(unreadable_files_limit_nothing, new_root, remove_root)
{
    static const char *const texts[] = { "",       "\n",       "x y",     "0 0",    "-5 100000",
                                         "100000", "100000 0", "nan nan", "1e300 1" };
    char line[3000];
    put("/proc/self/cgroup", "0::/\nno colon\n:\n0:cpu\n");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        put("/sys/fs/cgroup/cpu.max", texts[i]);
        assert_true(kvant_quota_cpus(root) == UINT32_MAX);
    }
    memset(line, 'a', sizeof line);
    memcpy(line, "0::/", 4);
    line[sizeof line - 1] = 0;
    put("/proc/self/cgroup", line);
    assert_true(kvant_quota_cpus(root) == UINT32_MAX);
}

static void count_worker(void *context, size_t index, uint32_t worker)
{
    const struct timespec moment = { .tv_nsec = 1000000 };
    nanosleep(&moment, NULL); /* workers that are awake run now */
    atomic_fetch_or((atomic_uint *)context, 1u << worker);
}

/* When the process is bound to one CPU, the caller runs the whole loop. Otherwise seven workers
 * would wake and find that they have to wait for the CPU. */
CASE(a_loop_on_one_cpu_runs_on_one_thread)
{
    cpu_set_t allowed, one;
    size_t first = 0;
    atomic_uint workers = 0;
    assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    assert_in_range(kvant_available_cpus(), 1, CPU_COUNT(&allowed));
    while (!CPU_ISSET(first, &allowed))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(kvant_available_cpus(), 1);
    kvant_parallel_for(16, 8, count_worker, &workers);
    assert_int_equal(atomic_load(&workers), 1);
    assert_int_equal(sched_setaffinity(0, sizeof allowed, &allowed), 0);
}

RUN_CASES(NULL, NULL)
