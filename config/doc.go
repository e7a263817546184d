// Package config holds kmirror's settings as plain data: their defaults, where they are read from, and what is wrong with them.
//
// It decides nothing at run time and imports no other package of this project; package main turns a Config into the options of
// each part. Settings come, each over the ones before, from Default, a YAML file, the environment (KMIRROR_SOURCE_BOOTSTRAP
// is source.bootstrap) and flags (--source.bootstrap).
//
//	flags := pflag.NewFlagSet("kmirror", pflag.ContinueOnError)
//	config.AddFlags(flags)
//	_ = flags.Parse(os.Args[1:])
//	c, warnings, err := config.Load("kmirror.yaml", os.Environ(), flags)
//
// An error of Load is a Problems: every unknown key, wrong type and bad value at once, each with its path. The keys are listed in
// docs/operations.md.
package config
