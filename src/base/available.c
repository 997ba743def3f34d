/* available.c - how many CPUs this process may use: its affinity, and the CPU time that its control
 * groups allow. More threads than that would only wait for each other. */
#include "available.h"

#include <kvant/kvant.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "os.h"

/* The longest path, and the longest line of /proc/self/cgroup. Groups of Kubernetes have about 200
 * characters. The limit of a group with a longer path is ignored. */
#define LONGEST 1024

/* The CPUs that a quota allows; both numbers are in microseconds. A quota above any machine's CPUs
 * means no limit. */
static uint32_t cpus_of(double quota, double period)
{
    if (!(quota > 0) || !(period > 0) || quota / period >= UINT32_MAX)
        return UINT32_MAX;
    uint32_t whole = (uint32_t)(quota / period);
    return whole + (whole * period < quota);
}

/* Reads the first two words of a file. */
static bool read_words(const char *folder, const char *name, char words[2][32])
{
    char path[LONGEST];
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = length > 0 && (size_t)length < sizeof path ? fopen(path, "r") : NULL;
    if (!file)
        return false;
    words[1][0] = 0;
    bool read = fscanf(file, "%31s %31s", words[0], words[1]) > 0;
    fclose(file);
    return read;
}

static double number(const char *word)
{
    double value = 0;
    return sscanf(word, "%lf", &value) == 1 ? value : 0;
}

/* The limit of one group. Version 2 of control groups has one file for it, version 1 has two. */
static uint32_t limit_of_group(const char *folder)
{
    char quota[2][32], period[2][32];
    if (read_words(folder, "cpu.max", quota)) /* "max 100000", or a number instead of max */
        return cpus_of(number(quota[0]), number(quota[1]));
    if (read_words(folder, "cpu.cfs_quota_us", quota) &&
        read_words(folder, "cpu.cfs_period_us", period))
        return cpus_of(number(quota[0]), number(period[0])); /* -1: no limit */
    return UINT32_MAX;
}

/* The lowest limit of a group and of the groups that contain it. A container often sees its group
 * at the mount point, but a path that exists only on the host. A group whose folder is missing
 * limits nothing. */
static uint32_t limit_of_groups(const char *root, const char *mount, const char *group)
{
    char folder[LONGEST];
    int length = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup/%s", root, mount);
    if (length < 0 || (size_t)length + strlen(group) >= sizeof folder)
        return UINT32_MAX;
    char *path = folder + length;
    memcpy(path, group, strlen(group) + 1);
    uint32_t limit = limit_of_group(folder);
    for (char *slash = strrchr(path, '/'); slash; slash = strrchr(path, '/')) {
        *slash = 0;
        uint32_t outer = limit_of_group(folder);
        limit = outer < limit ? outer : limit;
    }
    return limit;
}

static bool names_cpu(const char *controllers)
{
    for (const char *at = controllers; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == ',' || at[3] == 0))
            return true;
    return false;
}

/* The limit from a line of /proc/self/cgroup: "number:controllers:group". Version 2 names no
 * controllers. If both versions are in use, the groups of version 2 are in the folder unified. */
static uint32_t limit_of_line(const char *root, char *line)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group)
        return UINT32_MAX;
    controllers++;
    *group++ = 0;
    group[strcspn(group, "\n")] = 0;
    if (*controllers)
        return names_cpu(controllers) ? limit_of_groups(root, controllers, group) : UINT32_MAX;
    uint32_t limit = limit_of_groups(root, ".", group);
    uint32_t unified = limit_of_groups(root, "unified", group);
    return unified < limit ? unified : limit;
}

uint32_t kvant_quota_cpus(const char *root)
{
    char path[LONGEST], line[LONGEST];
    uint32_t limit = UINT32_MAX;
    int length = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = length > 0 && (size_t)length < sizeof path ? fopen(path, "r") : NULL;
    if (!file)
        return limit;
    while (fgets(line, sizeof line, file)) {
        uint32_t cpus = limit_of_line(root, line);
        limit = cpus < limit ? cpus : limit;
    }
    fclose(file);
    return limit;
}

static pthread_once_t quota_read = PTHREAD_ONCE_INIT;
static uint32_t quota;

static void read_quota(void)
{
    quota = kvant_quota_cpus("");
}

uint32_t kvant_available_cpus(void)
{
    pthread_once(&quota_read, read_quota);
    uint32_t n = kvant_os_processors();
    n = n < quota ? n : quota;
    return n > 0 ? n : 1;
}
