/* machine_macos.c - machine.h for macOS, which lends no program the times of its CPUs. */
#include "machine.h"

#include <mach/mach.h>
#include <math.h>
#include <unistd.h>

double machine_available_memory(void)
{
    vm_statistics64_data_t pages;
    mach_msg_type_number_t n = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &n) != 0)
        return 0;
    return (double)getpagesize() * ((double)pages.free_count + (double)pages.inactive_count);
}

double machine_idle_cpus(void)
{
    return HUGE_VAL;
}
