package classify

import "strings"

// What a word announces. Identity numbers have one each, after ctxIDs.
const (
	ctxNone = iota
	ctxEmail
	ctxPhone
	ctxCard
	ctxIBAN
	ctxAccount
	ctxNationalID // some identity or tax number
	ctxPassport
	ctxLicence
	ctxMedical
	ctxIP
	ctxWallet
	ctxBirth
	ctxAddress
	ctxName
	ctxSecret
	ctxNumber // number, no., id: announces nothing in particular
	ctxOther  // order, version, port, …: announces a number that is nobody's
	ctxDate
	ctxVersion // version, section: numbers with dots are no addresses
	ctxIDs
)

// contextWords, folded; two words stand for each other's neighbours. The
// languages are those of the national numbers.
//
//nolint:misspell // words of other languages
var contextWords = map[uint8]string{
	ctxEmail: "email|mail|emails|mailto|courriel|correo|e-mail|epost|sahkoposti|ηλεκτρονικο|ταχυδρομειο|почта|posta elettronica|inbox|邮箱|メール",
	ctxPhone: "phone|phones|telephone|tel|mobile|cell|cellphone|fax|call|calling|called|dial|whatsapp|ring|ext|extension|voicemail|hotline|landline|reachable|answering|msisdn|sms|telefon|telefonnummer|" +
		"handy|rufnummer|mobil|telefono|movil|celular|telefone|telemovel|portable|cellulare|numero de telephone|puhelin|puhelinnumero|nummer|mobiel|gsm|telefoon|τηλεφωνο|τηλ|κινητο|телефон|тел|telefonu|cep|hp|phone number|reach me|" +
		"text me|contact number|office|mobi|phonenumber|mobilenumber|ph|faks|telefone|pager|nummeret|电话|手机|電話",
	ctxCard: "card|cards|credit|debit|visa|mastercard|amex|discover|maestro|cc|ccn|pan|cvv|cvc|kreditkarte|karte|carte|tarjeta|carta|cartao|kort|karta|kartya|kreditkort|luottokortti|καρτα|карта|kredi|kart|creditcard|cardnumber|信用卡",
	ctxIBAN: "iban|bic|swift|bankverbindung|konto iban",
	ctxAccount: "account|acct|accounts|routing|sort code|sortcode|bank account|bsb|konto|kontonummer|kontonr|compte|cuenta|conto|conta|rekening|rekeningnummer|rachunek|ucet|számla|szamla|λογαριασμος|счет|hesap|clabe|ifsc|" +
		"customer number|customer id|member number|member id|membership number|policy number|policyholder|client number|client id|loan number|accountnumber|mitgliedsnummer|kundennummer|kundennr",
	ctxNationalID: "national id|identity number|identification number|tax id|taxpayer|tin|identity|citizen|id number|id card|personal number|social security|social insurance|identity card|personalausweis|ausweis|ausweisnummer|cedula|dokument|" +
		"identificacion|identite|identita|ταυτοτητα|ταυτοτητας|паспорт|удостоверение|kimlik|steuernummer|sozialversicherungsnummer|nationalid|taxid|身份证|身份證",
	ctxPassport: "passport|passports|passport number|reisepass|passnummer|passeport|pasaporte|passaporto|passaporte|paspoort|pass number|passi|paszport|utlevel|διαβατηριο|διαβατηριου|загранпаспорт|pasaport|passportnumber|护照",
	ctxLicence:  "licence|license|driver|drivers|driving|dl|fuhrerschein|fuhrerscheinnummer|permis|licencia|patente|carta conducao|rijbewijs|korkort|ajokortti|kierowcy|ehliyet|driverslicense|licensenumber|licenceplate|numberplate|vin|kennzeichen|conducir|διπλωμα|права|license plate|plate number",
	ctxMedical: "mrn|medical|patient|medicare|medicaid|health insurance|insurance number|insurance id|health number|health card|beneficiary id|hospital|krankenkasse|versichertennummer|krankenversichertennummer|patientennummer|prescription|record number|medical record|patient id|dossier|" +
		"historia clinica|insuranceid|patientid|hicn|ehr|clinic",
	ctxIP:      "ip|ipv4|ipv6|ip address|host|client_ip|remote|ipaddress|subnet|server",
	ctxWallet:  "wallet|btc|bitcoin|eth|ethereum|crypto|ltc|litecoin|usdt|monero|xmr|solana|doge|tron|trx|blockchain|ripple|xrp|cardano|ada",
	ctxBirth:   "born|birth|dob|birthday|birthdate|d.o.b|date of birth|of birth|birth date|geboren|geburtsdatum|geb|ne le|nee|naissance|nacimiento|nacido|nacida|nascita|nato|nata|nascimento|nascido|geboortedatum|fodt|fodelsedatum|fodselsdato|fodd|syntynyt|syntymaaika|urodzenia|urodzony|urodzona|narozeni|szuletett|szuletesi|γεννηθηκε|γεννησης|рождения|родился|родилась|dogum|birthdays|dateofbirth|birthdate|turned|生日|出生",
	ctxAddress: "address|addresses|street|live|lives|living|resides|reside|residing|deliver|delivery|shipping|ship|billing|mailing|located|adresse|anschrift|wohnhaft|direccion|domicilio|indirizzo|residente|endereco|adres|adress|osoite|διευθυνση|адрес|adresi|postal|postcode|zip|zipcode|mailed|home|moved|postanschrift|住所|地址|apartment",
	ctxName:    "name|named|names|surname|lastname|firstname|fullname|first name|last name|full name|vorname|nachname|nom|prenom|nombre|apellido|apellidos|nome|cognome|sobrenome|naam|voornaam|achternaam|namn|efternamn|navn|nimi|imie|nazwisko|jmeno|prijmeni|nev|ονομα|επωνυμο|имя|фамилия|isim|soyad|ad soyad|姓名|名前|이름|customer name|holder|cardholder|signed",
	ctxSecret:  "password|passwd|pwd|secret|token|api key|apikey|passphrase|credential|credentials|pin|passcode|passwort|kennwort|contrasena|motdepasse|clave|senha|wachtwoord|losenord|haslo|пароль|sifre|κωδικος",
	ctxNumber:  "number|no|nr|num|id|numero|nummer|numer|cislo|ref|code|#|αριθμος|номер|numarasi|n",
	ctxOther: "order|invoice|port|ticket|isbn|issn|doi|part|model|page|pages|line|lines|row|column|commit|timestamp|epoch|seconds|ms|bytes|pixels|population|copies|sku|upc|pid|offset|size|" +
		"length|bug|issue|case|article|table|equals|sum|product|total|multiply|divided|calculate|compute|factor|integer|prime",
	ctxDate:    "date|on|since|datum|fecha|data",
	ctxVersion: "version|release|build|chapter|section|revision|firmware|ver|figure|upgrade|upgraded|versions",
}

// idContext announces national numbers by name; the rest by country.
var idContext = map[string]string{
	"us-ssn": "ssn|ssns|social security|socialsecurity|soc sec", "us-itin": "itin|taxpayer", "us-npi": "npi|provider identifier|national provider", "us-aba": "aba|routing|rtn", "us-ein": "ein|fein|employer identification", "us-mbi": "mbi|medicare",
	"uk-nhs": "nhs", "uk-nino": "nino|national insurance|ni number", "uk-utr": "utr|taxpayer reference|unique taxpayer",
	"ca-sin": "sin|social insurance", "au-tfn": "tfn|tax file", "au-medicare": "medicare", "au-abn": "abn|business number", "nz-ird": "ird|inland revenue",
	"de-tax-id": "steuer id|steuerid|steuer identifikationsnummer|steueridentifikationsnummer|identifikationsnummer|idnr|steuer", "de-svnr": "sozialversicherungsnummer|rentenversicherungsnummer|svnr|sv nummer|versicherungsnummer", "de-id-card": "ausweisnr|personalausweis|ausweisnummer|personalausweisnummer",
	"fr-nir": "nir|insee|securite sociale|secu|vitale", "pt-nif": "nif|contribuinte", "nl-bsn": "bsn|burgerservicenummer|sofinummer", "be-nn": "rijksregisternummer|registre national|niss|insz|national number", "at-svnr": "svnr|sozialversicherungsnummer|sv nummer",
	"ch-ahv": "ahv|avs|ahvn13|ahv nummer", "pl-pesel": "pesel", "pl-nip": "nip", "cz-rc": "rodne cislo|rodne", "hu-taj": "taj|taj szam", "ro-cnp": "cnp|cod numeric", "bg-egn": "egn|егн", "hr-oib": "oib", "yu-jmbg": "jmbg|emso|embg|jmb|maticni broj",
	"gr-afm": "afm|αφμ|α.φ.μ|φορολογικο|μητρωου|tin|vat", "gr-amka": "amka|αμκα|κοινωνικης ασφαλισης", "se-pnr": "personnummer|personnr|pnr|samordningsnummer", "no-fnr": "fodselsnummer|fnr|personnummer|d nummer", "dk-cpr": "cpr|cpr nummer|personnummer",
	"fi-hetu": "hetu|henkilotunnus|sotu", "ee-lt-id": "isikukood|asmens kodas|asmens", "lv-pk": "personas kods|personas", "ie-pps": "pps|ppsn|pps number", "tr-tckn": "tc kimlik|tckn|kimlik|tc no", "il-id": "teudat zehut|zehut|תעודת זהות|זהות",
	"za-id": "south african|rsa id|sa id", "in-aadhaar": "aadhaar|aadhar|uidai|आधार", "in-pan": "pan|pan card|permanent account", "cn-rid": "resident identity|shenfenzheng|身份证|身份證", "jp-mynumber": "my number|mynumber|individual number|マイナンバー|個人番号",
	"kr-rrn": "rrn|resident registration|주민등록번호|주민번호", "th-id": "thai id|บัตรประชาชน", "my-nric": "nric|mykad|ic number", "br-cpf": "cpf", "br-cnpj": "cnpj", "ar-cuit": "cuit|cuil|dni", "cl-rut": "rut", "uy-ci": "cedula|cedula identidad",
	"ec-ci": "cedula", "ru-inn": "inn|инн", "ru-snils": "snils|снилс", "kz-iin": "iin|иин|жсн", "es-dni": "dni|nif|documento nacional", "es-nie": "nie|extranjero", "it-cf": "codice fiscale|fiscale", "tw-id": "taiwan id|身分證",
	"sg-nric": "nric|singapore", "hk-hkid": "hkid|hong kong", "mx-curp": "curp", "mx-rfc": "rfc",
}

// contextNames gives every identity number its own context.
var contextIDs = func() map[string]uint8 {
	m := map[string]uint8{}
	next := uint8(ctxIDs)
	for _, list := range [][]string{idNames()} {
		for _, n := range list {
			if m[n] == 0 {
				m[n] = next
				next++
			}
		}
	}
	return m
}()

func idNames() (out []string) {
	for i := range digitIDs {
		out = append(out, digitIDs[i].name)
	}
	for i := range letterIDs {
		out = append(out, letterIDs[i].name)
	}
	return out
}

// Words by what they are, for names, addresses and language.
//
//nolint:misspell // words of other languages
var classWords = map[uint16]string{
	lexTitle:    "mr|mrs|ms|miss|mister|dr|prof|professor|sir|madam|herr|frau|monsieur|madame|mme|mlle|senor|senora|sr|sra|don|dona|signor|signora|sig|dott|meneer|mevrouw|dhr|mevr|pan|pani|κυριος|κυρια|κ|господин|госпожа|bay|bayan|rev|lt|capt|sgt|hon|judge|president|senator|doctor|nurse|officer|uncle|aunt|aunty|grandma|grandpa|king|queen|prince|princess|lady|lord|coach|detective",
	lexMonth:    "january|february|march|april|may|june|july|august|september|october|november|december|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|januar|februar|marz|mai|juni|juli|oktober|dezember|janvier|fevrier|mars|avril|juin|juillet|aout|septembre|octobre|novembre|decembre|enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre|ιανουαριου|φεβρουαριου|μαρτιου|απριλιου|μαιου|ιουνιου|ιουλιου|αυγουστου|σεπτεμβριου|οκτωβριου|νοεμβριου|δεκεμβριου|января|февраля|марта|апреля|мая|июня|июля|августа|сентября|октября|ноября|декабря",
	lexRole:     "mother|father|mom|mum|dad|wife|husband|sister|brother|son|daughter|cousin|friend|neighbor|neighbour|boss|manager|colleague|coworker|patient|client|customer|employee|tenant|landlord|roommate|girlfriend|boyfriend|fiance|fiancee|niece|nephew|teacher|student|resident|applicant|candidate|my|dear|hi|hello|hey|regards|sincerely|cheers|thanks|contact|attn|from|cc|to|lieber|liebe|hallo|cher|chere|bonjour|hola|querido|estimado|gentile|caro|cara|αγαπητε|partner|spouse|nurse|lawyer|attorney|meet|met|ask|asked|call|called|tell|told|emailed|email|invited|signed|beneficiary|holder|cardholder|im|am|called",
	lexOrg:      "inc|ltd|llc|gmbh|ag|corp|corporation|company|co|plc|sa|srl|spa|bv|nv|oy|ab|as|group|bank|university|college|school|institute|hospital|church|museum|airport|hotel|band|club|fc|foundation|association|committee|department|ministry|agency|party|league|records|studios|systems|technologies|solutions|partners|holdings",
	lexParticle: "van|von|de|der|den|del|della|di|da|dos|das|du|la|le|el|al|bin|ibn|ben|abu|ter|ten|zu|zum|af|st|mac|mc|o|san|santa|y|e|i|bint|vander|dela|dello|degli",
	lexStreet: "street|st|avenue|ave|road|rd|lane|ln|drive|dr|boulevard|blvd|court|ct|place|pl|square|sq|terrace|way|circle|highway|hwy|parkway|pkwy|suite|apt|apartment|unit|flat|floor|box|building|rue|allee|chemin|impasse|quai|strasse|str|weg|platz|gasse|damm|ring|allee|ufer|via|viale|piazza|corso|vicolo|calle|avenida|avda|plaza|paseo|carrer|carretera|camino|rua|travessa|praca|alameda|" +
		"straat|laan|gracht|kade|plein|steenweg|gata|gatan|vagen|vag|gate|vei|veien|gade|vej|katu|tie|ulica|ul|aleja|al|plac|ulice|namesti|utca|ut|ter|korut|οδος|λεωφορος|улица|ул|проспект|пр|переулок|sokak|cadde|mahallesi|caddesi|sokagi|bulevar|strada|bulevardul|jalan|jl|corner|block|house|hno|p.o|po|esplanade|crescent|close|gardens|grove|mews|row|hill|rise|quay|broadway|trail|turnpike|pike|route|alley|plaza",
}

// numberWords of the languages in which digits are spelled out.
var numberWords = map[string]byte{
	"zero": '0', "oh": '0', "nought": '0', "one": '1', "two": '2', "three": '3', "four": '4', "five": '5', "six": '6', "seven": '7', "eight": '8', "nine": '9', "niner": '9',
	"null": '0', "eins": '1', "ein": '1', "zwei": '2', "zwo": '2', "drei": '3', "vier": '4', "funf": '5', "fuenf": '5', "sechs": '6', "sieben": '7', "acht": '8', "neun": '9',
	"un": '1', "deux": '2', "trois": '3', "quatre": '4', "cinq": '5', "sept": '7', "huit": '8', "neuf": '9',
	"cero": '0', "uno": '1', "dos": '2', "tres": '3', "cuatro": '4', "cinco": '5', "seis": '6', "siete": '7', "ocho": '8', "nueve": '9',
	"due": '2', "tre": '3', "quattro": '4', "cinque": '5', "sei": '6', "sette": '7', "otto": '8', "nove": '9',
	"um": '1', "dois": '2', "quatro": '4', "sete": '7', "oito": '8', "nul": '0', "een": '1', "twee": '2', "drie": '3', "vijf": '5', "zes": '6', "zeven": '7', "negen": '9',
	"noll": '0', "ett": '1', "tva": '2', "fyra": '4', "fem": '5', "sex": '6', "sju": '7', "atta": '8', "nio": '9',
	"μηδεν": '0', "ενα": '1', "δυο": '2', "τρια": '3', "τεσσερα": '4', "πεντε": '5', "εξι": '6', "επτα": '7', "εφτα": '7', "οκτω": '8', "οχτω": '8', "εννεα": '9', "εννια": '9',
	"ноль": '0', "один": '1', "два": '2', "три": '3', "четыре": '4', "пять": '5', "шесть": '6', "семь": '7', "восемь": '8', "девять": '9',
}

// pairKey joins the hashes of two neighbours.
func pairKey(a, b uint32) uint64 { return uint64(a)<<32 | uint64(b) }

// addContext fills the words and pairs of the lexicon.
func (l *lexicon) addContext() {
	add := func(ctx uint8, list string) {
		for p := range strings.SplitSeq(list, "|") {
			w := strings.FieldsFunc(p, func(r rune) bool { return r == ' ' || r == '-' || r == '.' || r == '_' })
			switch {
			case len(w) == 1:
				l.setContext(hashWord(w[0]), ctx)
			case len(w) >= 2:
				a, b := hashWord(w[len(w)-2]), hashWord(w[len(w)-1])
				l.pairs[pairKey(a, b)] = ctx
				l.setLex(a, lexPair)
			}
		}
	}
	for _, ctx := range []uint8{ctxOther, ctxVersion, ctxNumber, ctxDate, ctxName, ctxAddress, ctxSecret, ctxWallet, ctxIP, ctxMedical, ctxLicence, ctxPassport, ctxNationalID, ctxAccount, ctxIBAN, ctxCard, ctxPhone, ctxEmail, ctxBirth} {
		add(ctx, contextWords[ctx])
	}
	for _, n := range idNames() {
		for p := range strings.SplitSeq(idContext[n], "|") {
			// A word that several kinds share keeps its general meaning.
			if !strings.Contains(p, " ") {
				if c := l.announces(hashWord(p)); c != 0 && c != ctxOther && c != ctxVersion && c != ctxNumber {
					continue
				}
			}
			add(contextIDs[n], p)
		}
	}
	for flag, list := range classWords {
		for w := range strings.SplitSeq(list, "|") {
			l.setLex(hashWord(w), flag)
		}
	}
	for w := range numberWords {
		l.setLex(hashWord(w), lexNumber)
	}
}
