package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const (
	defaultDatabase = "payments.db"
	defaultAddr     = "127.0.0.1:7070"
)

const usage = `payments serve    [-db DSN] [-listen ADDR] [-pages ADDR]
payments charge   [-server ADDR] [-pending FILE] [-timeout D] -account NAME -cents N -order NAME
payments find     [-db DSN] KEY
payments open     [-db DSN]
payments resolve  [-db DSN] ID free|cancelled|charged=CHARGE
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "payments:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, errs io.Writer) error {
	commands := map[string]func(context.Context, *flag.FlagSet, []string, io.Writer) error{
		"serve": serveCommand, "charge": chargeCommand,
		"find": findCommand, "open": openCommand, "resolve": resolveCommand,
	}
	if len(args) == 0 || commands[args[0]] == nil {
		_, _ = io.WriteString(errs, usage)
		return fmt.Errorf("command %q: must be serve, charge, find, open or resolve", first(args))
	}
	flags := flag.NewFlagSet("payments "+args[0], flag.ContinueOnError)
	flags.SetOutput(errs)
	return commands[args[0]](ctx, flags, args[1:], out)
}

func first(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// parse reads flags and says how many other arguments there must be.
func parse(flags *flag.FlagSet, args []string, rest int) error {
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != rest {
		return fmt.Errorf("%d arguments after the flags: must be %d\n%s", flags.NArg(), rest, usage)
	}
	return nil
}

func serveCommand(ctx context.Context, flags *flag.FlagSet, args []string, out io.Writer) error {
	dsn := flags.String("db", defaultDatabase, "a `file` for SQLite, or the URL of a PostgreSQL database")
	listen := flags.String("listen", defaultAddr, "`address` to serve on")
	pages := flags.String("pages", "", "`address` of the pages for people on call; keep it away from strangers")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	return serve(ctx, *dsn, *listen, *pages, out)
}

func chargeCommand(ctx context.Context, flags *flag.FlagSet, args []string, out io.Writer) error {
	server := flags.String("server", defaultAddr, "`address` of the service")
	file := flags.String("pending", "pending.json", "`file` that remembers the charge under way")
	timeout := flags.Duration("timeout", 10*time.Second, "how long to try")
	var c charge
	flags.StringVar(&c.Account, "account", "", "whose money")
	flags.Int64Var(&c.Cents, "cents", 0, "how much")
	flags.StringVar(&c.Order, "order", "", "for what")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	conn, payments, err := dial(*server)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	c, receipt, err := chargeOnce(ctx, payments, *file, c)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "charged %d cents to %s for %s: %s, %d cents left\n",
		c.Cents, c.Account, c.Order, receipt.GetChargeId(), receipt.GetBalanceCents())
	return err
}

func findCommand(ctx context.Context, flags *flag.FlagSet, args []string, out io.Writer) error {
	dsn := flags.String("db", defaultDatabase, "the service's `database`")
	if err := parse(flags, args, 1); err != nil {
		return err
	}
	return atDesk(ctx, *dsn, func(d *desk) error {
		r, err := d.find(ctx, flags.Arg(0))
		if err == nil {
			_, err = fmt.Fprintln(out, r)
		}
		return err
	})
}

func openCommand(ctx context.Context, flags *flag.FlagSet, args []string, out io.Writer) error {
	dsn := flags.String("db", defaultDatabase, "the service's `database`")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	return atDesk(ctx, *dsn, func(d *desk) error {
		records, err := d.open(ctx)
		for _, r := range records {
			_, printErr := fmt.Fprintln(out, r)
			err = errors.Join(err, printErr)
		}
		return err
	})
}

func resolveCommand(ctx context.Context, flags *flag.FlagSet, args []string, out io.Writer) error {
	dsn := flags.String("db", defaultDatabase, "the service's `database`")
	if err := parse(flags, args, 2); err != nil {
		return err
	}
	return atDesk(ctx, *dsn, func(d *desk) error {
		if err := d.resolve(ctx, flags.Arg(0), flags.Arg(1)); err != nil {
			return err
		}
		_, err := fmt.Fprintf(out, "%s: resolved as %s\n", flags.Arg(0), flags.Arg(1))
		return err
	})
}
