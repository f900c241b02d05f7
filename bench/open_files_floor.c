// The least that finding the process nearest to its descriptor limit costs: list /proc, then fstatat and prlimit for each process.
// Prints the CPU milliseconds of each round. Usage: open_files_floor ROUNDS
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

static double cpu(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    for (int round = 0; round < rounds; round++) {
        double start = cpu(), worst = -1;
        long descriptors = 0, processes = 0;
        DIR *directory = opendir("/proc");
        if (!directory) return 1;
        int proc = dirfd(directory);
        struct dirent *entry;
        while ((entry = readdir(directory))) {
            if (!isdigit((unsigned char)entry->d_name[0])) continue;
            char path[300];
            struct stat status;
            struct rlimit limit;
            snprintf(path, sizeof path, "%s/fd", entry->d_name);
            if (fstatat(proc, path, &status, 0) || prlimit(atoi(entry->d_name), RLIMIT_NOFILE, NULL, &limit)) continue;
            processes++;
            descriptors += status.st_size;
            double ratio = limit.rlim_cur ? (double)status.st_size / limit.rlim_cur : 1e9;
            if (ratio > worst) worst = ratio;
        }
        closedir(directory);
        printf("%f %ld %ld %f\n", cpu() - start, processes, descriptors, worst);
    }
    return 0;
}
