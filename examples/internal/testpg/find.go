package testpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// programs are the server's programs and what they need to run.
type programs struct {
	bin string
	lib []string // folders of shared libraries beside the machine's own
}

func (p programs) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, name), args...) //nolint:gosec // PostgreSQL's own, with arguments of this package
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	if len(p.lib) > 0 {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+strings.Join(p.lib, ":"))
	}
	return cmd
}

// find returns programs on the machine, the newest of Debian's where there are
// several, else unpacked ones.
func find(ctx context.Context) (programs, error) {
	var dirs []string
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	debian, _ := filepath.Glob("/usr/lib/postgresql/*/bin") // the only error is a bad pattern
	slices.SortFunc(debian, func(a, b string) int { return majorOf(b) - majorOf(a) })
	dirs = append(dirs, debian...)
	if path, err := exec.LookPath("initdb"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, dir := range dirs {
		if complete(dir) {
			return programs{bin: dir}, nil
		}
	}
	p, err := unpacked(ctx)
	if err != nil {
		return programs{}, fmt.Errorf("no PostgreSQL server programs (initdb, postgres) in %q and none to unpack (%w): "+
			"install the package postgresql (Debian, Ubuntu: apt-get install postgresql), or name a server with %s", dirs, err, Env)
	}
	return p, nil
}

func complete(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

// majorOf reads the 15 of /usr/lib/postgresql/15/bin.
func majorOf(bin string) int {
	n, err := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	if err != nil {
		return 0
	}
	return n
}

// unpacked downloads Debian's packages into a cache and unpacks them there,
// once.
func unpacked(ctx context.Context) (programs, error) {
	cache, err := cacheDir()
	if err != nil {
		return programs{}, err
	}
	root := filepath.Join(cache, "root")
	if p, ok := programsIn(root); ok {
		return p, nil
	}
	// Another test binary may be at it: each works in a folder of its own, and
	// the first to be done gives its name.
	work, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return programs{}, fmt.Errorf("make a folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := unpack(ctx, work); err != nil {
		return programs{}, err
	}
	if err := os.Rename(filepath.Join(work, "root"), root); err != nil && !errors.Is(err, os.ErrExist) {
		if p, ok := programsIn(root); ok {
			return p, nil
		}
		return programs{}, fmt.Errorf("keep what was unpacked: %w", err)
	}
	p, ok := programsIn(root)
	if !ok {
		return programs{}, fmt.Errorf("the packages have no initdb and postgres below %s", root)
	}
	return p, nil
}

// cacheDir is one that the server's user can read, which root's home is not.
func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if os.Geteuid() == 0 || err != nil {
		base = "/var/tmp"
	}
	dir := filepath.Join(base, "belay-testpg")
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // the server runs as another user
		return "", fmt.Errorf("make a cache: %w", err)
	}
	return dir, nil
}

func programsIn(root string) (programs, bool) {
	bins, _ := filepath.Glob(filepath.Join(root, "usr/lib/postgresql/*/bin"))
	for _, bin := range bins {
		if complete(bin) {
			libs, _ := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu*"))
			more, _ := filepath.Glob(filepath.Join(root, "lib/*-linux-gnu*"))
			return programs{bin: bin, lib: append(libs, more...)}, true
		}
	}
	return programs{}, false
}

// notNeeded are dependencies of the package that the bare server does without:
// Debian's service scripts, and the compiler that it loads when it is there.
var notNeeded = regexp.MustCompile(`^(postgresql-common|postgresql-client-common|postgresql-client-.*|ssl-cert|libllvm.*|perl.*|libperl.*|adduser|lsb-base|sysvinit-utils|debconf.*|cdebconf.*|netbase|openssl|locales.*|tzdata.*)$`)

func unpack(ctx context.Context, work string) error {
	out, err := exec.CommandContext(ctx, "apt-cache", "search", "--names-only", `^postgresql-[0-9]+$`).Output()
	if err != nil {
		return fmt.Errorf("apt-cache: %w", err)
	}
	best := 0
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(line, " ")
		if n, err := strconv.Atoi(strings.TrimPrefix(name, "postgresql-")); err == nil {
			best = max(best, n)
		}
	}
	if best == 0 {
		return errors.New("apt-cache knows no package postgresql-N (apt-get update?)")
	}
	server := "postgresql-" + strconv.Itoa(best)
	missing, err := dependencies(ctx, server)
	if err != nil {
		return err
	}
	download := exec.CommandContext(ctx, "apt-get", append([]string{"download"}, missing...)...) //nolint:gosec // names that apt-cache gave
	download.Dir = work
	if out, err := download.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get download %s: %w\n%s", strings.Join(missing, " "), err, out)
	}
	packages, _ := filepath.Glob(filepath.Join(work, "*.deb"))
	for _, deb := range packages {
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, filepath.Join(work, "root")).CombinedOutput(); err != nil { //nolint:gosec // what apt-get has just put there
			return fmt.Errorf("dpkg -x %s: %w\n%s", filepath.Base(deb), err, out)
		}
	}
	return os.Chmod(work, 0o755) //nolint:gosec // the server runs as another user
}

// dependencies returns the package and what it needs that is not installed.
func dependencies(ctx context.Context, server string) ([]string, error) {
	//nolint:gosec // a name that apt-cache gave
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts",
		"--no-breaks", "--no-replaces", "--no-enhances", "--no-pre-depends", server).Output()
	if err != nil {
		return nil, fmt.Errorf("apt-cache depends %s: %w", server, err)
	}
	needed := []string{server}
	for line := range strings.Lines(string(out)) {
		name := strings.TrimSpace(line)
		if strings.HasPrefix(line, " ") || name == "" || strings.HasPrefix(name, "<") || name == server || notNeeded.MatchString(name) {
			continue // an edge of the graph, a virtual package, or not for us
		}
		status, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${db:Status-Status}", name).Output() //nolint:gosec // a name that apt-cache gave
		if err == nil && string(status) == "installed" {
			continue
		}
		needed = append(needed, name)
	}
	slices.Sort(needed)
	return slices.Compact(needed), nil
}
